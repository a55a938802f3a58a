"""Generate with a static cache: attention_cached in PyTorch, TensorScatter and Attention (opset 24) in the ONNX file.

The caches have a fixed capacity. A call writes its new keys and values at each sequence's own length and attends to what is valid;
the lengths stay on the device. One file serves the prompt (many tokens) and each further token, and prompts of different lengths
share a batch. `forward` returns the caches: an ONNX graph has no other way to hand on what was written.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from common import OUT, Comparison, OnnxModel, compiled, set_up
from tiny_decoder import HEAD_SIZE, HEADS, KV_HEADS, LAYERS, TinyDecoder, generate_from_scratch, judge_decoder
from torch import Tensor, nn

import torch_onnx_attn
import torch_onnx_attn.onnx

CAPACITY, STEPS, TOLERANCE = 32, 12, 1e-4
PROMPTS = [[5, 17, 3, 88, 41], [23, 9, 60], [71, 2, 2, 34, 11, 90, 6]]

# (tokens, lengths, caches) -> logits, caches
Step = Callable[[Tensor, Tensor, list[Tensor]], tuple[Tensor, list[Tensor]]]


class StaticCacheDecoder(nn.Module):
    def __init__(self, decoder: TinyDecoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: Tensor, lengths: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        """tokens [batch, rows], lengths [batch] in the caches before the call, caches: keys and values of each layer in turn."""

        def attend(layer: int, Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
            keys, values = caches[2 * layer : 2 * layer + 2]
            return torch.ops.onnx_attn.attention_cached(Q, K, V, keys, values, lengths, is_causal=True, **HEADS)

        positions = lengths[:, None] + torch.arange(tokens.shape[1])
        return self.decoder(tokens, positions, attend), *caches


def empty_caches(batch: int, fill: float = 0.0) -> list[Tensor]:
    return [torch.full((batch, KV_HEADS, CAPACITY, HEAD_SIZE), fill) for _ in range(2 * LAYERS)]


def generate(step: Step, fill: float) -> Tensor:
    """The logits [prompts, STEPS, VOCABULARY] that the greedy tokens of each prompt are chosen from."""
    lengths = torch.tensor([len(prompt) for prompt in PROMPTS])
    padded = torch.tensor([prompt + [0] * (int(lengths.max()) - len(prompt)) for prompt in PROMPTS])
    logits, caches = step(padded, torch.zeros_like(lengths), empty_caches(len(PROMPTS), fill))
    chosen = [logits[torch.arange(len(PROMPTS)), lengths - 1]]
    for _ in range(STEPS - 1):
        logits, caches = step(chosen[-1].argmax(-1, keepdim=True), lengths, caches)  # overwrites the padding's rows
        lengths = lengths + 1
        chosen.append(logits[:, 0])
    return torch.stack(chosen, 1)


def main() -> None:
    set_up()
    model = StaticCacheDecoder(TinyDecoder()).eval().requires_grad_(False)
    print(f"A decoder of {LAYERS} layers with random weights; {len(PROMPTS)} prompts of {', '.join(str(len(p)) for p in PROMPTS)} tokens,")
    print(f"{STEPS} tokens generated for each, caches of capacity {CAPACITY}\n")

    path = OUT / "static_cache_decoder.onnx"
    example = (torch.zeros(2, 4, dtype=torch.int64), torch.tensor([1, 2]), *empty_caches(2))
    cache_sizes = tuple({0: "batch"} for _ in range(2 * LAYERS))
    names = [f"{kind}_{layer}" for layer in range(LAYERS) for kind in ("keys", "values")]
    torch_onnx_attn.onnx.export(
        model,
        example,
        path,
        dynamic_shapes={"tokens": {0: "batch", 1: "rows"}, "lengths": {0: "batch"}, "caches": cache_sizes},
        input_names=["tokens", "lengths", *names],
        output_names=["logits", *(f"{name}_out" for name in names)],
    )
    exported = OnnxModel(path)
    fast, compiler = compiled(model, fullgraph=True, dynamic=True)

    def torch_step(run: Callable[..., tuple[Tensor, ...]]) -> Step:
        return lambda tokens, lengths, caches: (run(tokens, lengths, *caches)[0], caches)  # written in place

    def onnx_step(tokens: Tensor, lengths: Tensor, caches: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        logits, *caches = exported(tokens, lengths, *caches)
        return logits, caches

    want = generate_from_scratch(model.decoder, PROMPTS, STEPS)
    comparison, tokens = Comparison(want, TOLERANCE, parts=STEPS), {}
    # The op never reads past a sequence's length, so not-a-number there is no matter; ONNX Runtime multiplies it by zero.
    nan = float("nan")
    for label, step, fill in (
        ("PyTorch eager", torch_step(model), nan),
        (compiler, torch_step(fast), nan),
        (exported.label, onnx_step, 0.0),
    ):
        result = comparison.run(label, generate, step, fill)
        tokens[label] = result.argmax(-1)
    verdict, nodes = judge_decoder(comparison, tokens, exported)
    verdict.require(nodes["TensorScatter"] == 2 * LAYERS, f"{2 * LAYERS} TensorScatter nodes, one for each cache")
    verdict.finish()


if __name__ == "__main__":
    main()
