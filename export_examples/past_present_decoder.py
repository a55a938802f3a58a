"""Generate with growing caches: attention.kv in PyTorch, one Attention node with past and present (opset 23) in the ONNX file.

Each call takes the keys and values so far and returns them with the new ones appended. The first call passes a past of length 0,
so that one file serves the prompt and each further token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from common import OUT, Comparison, OnnxModel, compiled, set_up
from tiny_decoder import HEAD_SIZE, HEADS, KV_HEADS, LAYERS, TinyDecoder, generate_from_scratch, judge_decoder
from torch import Tensor, nn

import torch_onnx_attn
import torch_onnx_attn.onnx

STEPS, TOLERANCE = 12, 1e-4
PROMPTS = [[5, 17, 3, 88, 41], [71, 2, 34, 11, 6]]  # of one length: past and present have no padding

# (tokens, past) -> logits, present
Step = Callable[[Tensor, list[Tensor]], tuple[Tensor, list[Tensor]]]


class PastPresentDecoder(nn.Module):
    def __init__(self, decoder: TinyDecoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        """tokens [batch, rows]; past: keys and values [batch, KV_HEADS, past_len, HEAD_SIZE] of each layer in turn."""
        present: list[Tensor] = []

        def attend(layer: int, Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
            keys, values = past[2 * layer : 2 * layer + 2]
            result = torch_onnx_attn.attention(Q, K, V, past_key=keys, past_value=values, is_causal=True, **HEADS)
            present.extend((result.present_key, result.present_value))
            return result.Y

        positions = past[0].shape[2] + torch.arange(tokens.shape[1])
        logits = self.decoder(tokens, positions[None], attend)
        return logits, *present


def generate(step: Step) -> Tensor:
    """The logits [prompts, STEPS, VOCABULARY] that the greedy tokens of each prompt are chosen from."""
    past = [torch.empty(len(PROMPTS), KV_HEADS, 0, HEAD_SIZE) for _ in range(2 * LAYERS)]
    tokens, chosen = torch.tensor(PROMPTS), []
    for _ in range(STEPS):
        logits, past = step(tokens, past)
        chosen.append(logits[:, -1])
        tokens = chosen[-1].argmax(-1, keepdim=True)
    return torch.stack(chosen, 1)


def main() -> None:
    set_up()
    model = PastPresentDecoder(TinyDecoder()).eval().requires_grad_(False)
    print(f"A decoder of {LAYERS} layers with random weights; {len(PROMPTS)} prompts of {len(PROMPTS[0])} tokens,")
    print(f"{STEPS} tokens generated for each, caches that grow by concatenation inside the node\n")

    path = OUT / "past_present_decoder.onnx"
    example = (torch.zeros(2, 4, dtype=torch.int64), *(torch.randn(2, KV_HEADS, 3, HEAD_SIZE) for _ in range(2 * LAYERS)))
    names = [f"{kind}_{layer}" for layer in range(LAYERS) for kind in ("key", "value")]
    torch_onnx_attn.onnx.export(
        model,
        example,
        path,
        dynamic_shapes={"tokens": {0: "batch", 1: "rows"}, "past": tuple({0: "batch", 2: "past_len"} for _ in range(2 * LAYERS))},
        input_names=["tokens", *(f"past_{name}" for name in names)],
        output_names=["logits", *(f"present_{name}" for name in names)],
    )
    exported = OnnxModel(path)
    fast, compiler = compiled(model, fullgraph=True, dynamic=True)

    def torch_step(run: Callable[..., tuple[Tensor, ...]]) -> Step:
        def step(tokens: Tensor, past: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            logits, *present = run(tokens, *past)
            return logits, present

        return step

    want = generate_from_scratch(model.decoder, PROMPTS, STEPS)
    comparison, tokens = Comparison(want, TOLERANCE, parts=STEPS), {}
    for label, run in (("PyTorch eager", model), (compiler, fast), (exported.label, exported)):
        result = comparison.run(label, generate, torch_step(run))
        tokens[label] = result.argmax(-1)
    verdict, nodes = judge_decoder(comparison, tokens, exported)
    verdict.require(nodes["Concat"] == 0, "no Concat node: the caches grow inside the Attention nodes")
    verdict.finish()


if __name__ == "__main__":
    main()
