"""The other implementations a user could call, built for one line. A builder raises when its implementation cannot do the line.

Peers that are not part of torch are in extra_peers.py; they are found when they are importable.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import candidates, extra_peers
from benchmarks.candidates import Candidate, Refused
from benchmarks.inputs import Inputs, key_mask
from benchmarks.shapes import Line

BACKENDS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_math": SDPBackend.MATH,
}


def _sdpa_arguments(line: Line, inputs: Inputs) -> dict[str, Any]:
    """Keyword arguments of scaled_dot_product_attention beside Q, K and V."""
    if line.softcap or line.window >= 0:
        raise Refused("scaled_dot_product_attention has no window and no softcap")
    arguments: dict[str, Any] = {"enable_gqa": line.q_heads != line.kv_heads}
    if inputs.mask is not None:
        arguments["attn_mask"] = inputs.mask.expand(line.batch, *_head_axis(line, inputs.mask), *inputs.mask.shape[2:])
    elif inputs.key_lengths is not None:
        arguments["attn_mask"] = key_mask(inputs.key_lengths, line.kv_len)
    elif line.causal and line.q_len == line.kv_len:
        arguments["is_causal"] = True
    elif line.causal:
        from torch.nn.attention.bias import causal_lower_right

        arguments["attn_mask"] = causal_lower_right(line.q_len, line.kv_len)
    elif inputs.lengths is not None and line.call == "attention":
        arguments["attn_mask"] = key_mask(inputs.lengths, line.kv_len)
    return arguments


def _head_axis(line: Line, mask: Tensor) -> tuple[int]:
    return (line.q_heads if mask.shape[1] > 1 else 1,)


def sdpa(name: str, line: Line, sets: list[Inputs]) -> Candidate:
    calls = [partial(scaled_dot_product_attention, x.q, x.k, x.v, **_sdpa_arguments(line, x)) for x in sets]
    if name == "sdpa":  # whatever torch picks
        return Candidate(name, calls)
    return Candidate(name, calls, context=partial(sdpa_kernel, BACKENDS[name]))


def flex(line: Line, sets: list[Inputs]) -> Candidate:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not sets[0].q.is_cuda:
        raise Refused("compiled FlexAttention is timed on CUDA only")
    torch._dynamo.reset()  # one compilation for each line, without the limit on recompilations
    compiled = torch.compile(flex_attention, dynamic=False)
    calls = []
    for inputs in sets:
        score, keep = _flex_functions(line, inputs)
        block_mask = None
        if keep is not None:
            by_batch = inputs.lengths is not None or inputs.key_lengths is not None or line.mask.startswith("bool:B")
            rows = line.batch if by_batch else None
            block_mask = create_block_mask(keep, rows, None, line.q_len, line.kv_len, device=str(inputs.q.device))
        gqa = line.q_heads != line.kv_heads
        calls.append(partial(compiled, inputs.q, inputs.k, inputs.v, score_mod=score, block_mask=block_mask, enable_gqa=gqa))
    return Candidate("flex", calls)


def _flex_functions(line: Line, inputs: Inputs) -> tuple[Callable[..., Tensor] | None, Callable[..., Tensor] | None]:
    """score_mod and mask_mod of the line."""
    mask, window, softcap = inputs.mask, line.window, line.softcap
    score: Callable[..., Tensor] | None = None
    keep: Callable[..., Tensor] | None = None
    lengths = inputs.lengths if inputs.lengths is not None else inputs.key_lengths
    if line.mask.startswith("bias"):
        one_head = mask.shape[1] == 1

        def score(s, b, h, i, j):
            return s + mask[0, 0 if one_head else h, i, j]
    elif softcap:

        def score(s, b, h, i, j):
            return softcap * torch.tanh(s / softcap)

    if line.mask.startswith("bool"):
        one_batch, one_row = mask.shape[0] == 1, mask.shape[2] == 1

        def keep(b, h, i, j):
            return mask[0 if one_batch else b, 0, 0 if one_row else i, j]
    elif lengths is not None:

        def keep(b, h, i, j):
            return j < lengths[b]
    elif window >= 0:

        def keep(b, h, i, j):
            return (i >= j) & (i - j <= window)
    elif line.causal:

        def keep(b, h, i, j):
            return i >= j

    return score, keep


def concatenate_then_attend(name: str, line: Line, sets: list[Inputs]) -> Candidate:
    """past + new = present, then SDPA: what a model without a fused cache does."""

    def call(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        keys = torch.cat((inputs.past_key, inputs.k), 2)
        values = torch.cat((inputs.past_value, inputs.v), 2)
        return scaled_dot_product_attention(inputs.q, keys, values, enable_gqa=True), keys, values

    calls = [partial(call, inputs) for inputs in sets]
    if name == "cat_sdpa":
        return Candidate(name, calls)
    return Candidate(name, calls, context=partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION))


def write_then_attend(name: str, line: Line, sets: list[Inputs]) -> Candidate:
    """A static cache: index_copy_ of the new rows, then SDPA over the whole buffer. Right only because every row is full."""

    def call(inputs: Inputs, position: Tensor) -> Tensor:
        inputs.past_key.index_copy_(2, position, inputs.k)
        inputs.past_value.index_copy_(2, position, inputs.v)
        return scaled_dot_product_attention(inputs.q, inputs.past_key, inputs.past_value, enable_gqa=True)

    if line.lengths != line.kv_len:
        raise Refused("needs every row of the cache to be full")
    calls = [partial(call, inputs, inputs.positions[:1] + torch.arange(line.q_len, device=inputs.q.device)) for inputs in sets]
    return Candidate(name, calls, context=partial(sdpa_kernel, BACKENDS["sdpa_" + name.removeprefix("write_")]))


def scatter_rows(name: str, line: Line, sets: list[Inputs]) -> Candidate:
    """Rows written at a position of their own in each batch entry, through index_put_ or scatter_ of torch."""
    calls = []
    for inputs in sets:
        device, cache, update = inputs.q.device, inputs.cache, inputs.q
        rows = inputs.positions[:, None] + torch.arange(line.q_len, device=device)  # [batch, q_len]
        if name == "index_put":
            batch, head = torch.arange(line.batch, device=device), torch.arange(line.kv_heads, device=device)
            calls.append(partial(cache.index_put_, (batch[:, None, None], head[:, None], rows[:, None]), update))
        else:
            calls.append(partial(cache.scatter_, 2, rows[:, None, :, None].expand_as(update), update))
    return Candidate(name, calls)


def eager_scores(line: Line, sets: list[Inputs]) -> Candidate:
    """Attention written out in torch operations, which has the score matrix at hand."""

    def call(inputs: Inputs, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        stages = [torch.matmul(inputs.q * line.head_size**-0.5, inputs.k.transpose(-1, -2))]
        stages.append(line.softcap * torch.tanh(stages[-1] / line.softcap) if line.softcap else stages[-1])
        stages.append(stages[-1] if hidden is None else stages[-1].masked_fill(hidden, float("-inf")))
        stages.append(torch.softmax(stages[-1], -1))
        return torch.matmul(stages[-1], inputs.v), stages[line.mode or 0]

    hidden = None
    if line.causal:
        hidden = torch.ones(line.q_len, line.kv_len, dtype=torch.bool, device=sets[0].q.device).triu(1)
    return Candidate("eager_scores", [partial(call, inputs, hidden) for inputs in sets])


BUILDERS: dict[str, Callable[[Line, list[Inputs]], Candidate]] = {
    **{name: partial(sdpa, name) for name in ("sdpa", *BACKENDS)},
    **{name: partial(concatenate_then_attend, name) for name in ("cat_sdpa", "cat_cudnn")},
    **{name: partial(write_then_attend, name) for name in ("write_flash", "write_cudnn")},
    **{name: partial(scatter_rows, name) for name in ("index_put", "scatter")},
    "flex": flex,
    "eager_scores": eager_scores,
    "ours_plain": candidates.ours_plain,
    "ours_exact": candidates.ours_exact,
    "fa4": extra_peers.fa4,
    "flashinfer": extra_peers.flashinfer,
    "ort": extra_peers.ort,
}
