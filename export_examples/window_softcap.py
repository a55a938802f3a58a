"""Sliding window and softcap, as in Gemma 2: attributes of one Attention node at opset 25, with no mask tensor anywhere.

A window of W tokens is left_window_size = W - 1: ONNX counts the keys before the query's own.
"""

from __future__ import annotations

import torch
from common import OUT, Comparison, OnnxModel, Verdict, compiled, difference, set_up
from tiny_decoder import HEADS, LAYERS, LONGEST, VOCABULARY, TinyDecoder, attend_without_cache
from torch import Tensor, nn

import torch_onnx_attn
import torch_onnx_attn.onnx

WINDOW, SOFTCAP, SCALE, TOLERANCE = 8, 5.0, 0.3, 1e-4


class WindowedDecoder(nn.Module):
    def __init__(self, decoder: TinyDecoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: Tensor) -> Tensor:
        def attend(_layer: int, Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
            window = {"is_causal": True, "left_window_size": WINDOW - 1}
            return torch_onnx_attn.attention(Q, K, V, softcap=SOFTCAP, scale=SCALE, **window, **HEADS).Y

        return self.decoder(tokens, torch.arange(tokens.shape[1])[None], attend)


def main() -> None:
    set_up()
    model = WindowedDecoder(TinyDecoder()).eval().requires_grad_(False)
    tokens = torch.randint(VOCABULARY, (2, LONGEST))
    print(f"A decoder of {LAYERS} layers with random weights; {LONGEST} tokens, causal window of {WINDOW}, softcap {SOFTCAP}\n")

    path = OUT / "window_softcap.onnx"
    torch_onnx_attn.onnx.export(
        model, (tokens,), path, dynamic_shapes=({0: "batch", 1: "rows"},), input_names=["tokens"], output_names=["logits"]
    )
    exported = OnnxModel(path)
    fast, compiler = compiled(model, fullgraph=True, dynamic=True)

    attend = attend_without_cache(WINDOW, SOFTCAP, SCALE)
    want = model.decoder(tokens, torch.arange(LONGEST)[None], attend)
    comparison = Comparison(want, TOLERANCE)
    for label, run in (("PyTorch eager", model), (compiler, fast), (exported.label, lambda *inputs: exported(*inputs)[0])):
        comparison.run(label, run, tokens)
    print("Compared with the same model whose attention is written with masks in plain torch:")
    comparison.show("logits")

    print(f"\n{exported.describe()}")
    verdict, nodes = Verdict(), exported.count()
    comparison.judge(verdict, "logits as with masks")
    full = model.decoder(tokens, torch.arange(LONGEST)[None], attend_without_cache(None, SOFTCAP, SCALE))
    verdict.require(difference(full, want) > 100 * TOLERANCE, "the window matters: without it the logits are others")
    verdict.require(nodes["Attention"] == LAYERS, f"{LAYERS} Attention nodes, one for each layer")
    verdict.require(nodes["Softmax"] + nodes["Tanh"] + nodes["Where"] == 0, "no Softmax, Tanh or Where node: no attention was taken apart")
    short = tokens[:1, :3]
    verdict.require(difference(exported(short)[0], model(short)) < TOLERANCE, "the same file runs at batch 1 and 3 tokens")
    verdict.finish()


if __name__ == "__main__":
    main()
