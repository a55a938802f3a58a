"""A candidate is one implementation of one line, ready to be called; and the candidates of our own ops."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.inputs import Inputs
from benchmarks.shapes import Line


class Refused(Exception):  # noqa: N818  a finding, not a fault
    """This implementation cannot do this line; the message says why."""


def _as_tuple(result: Any) -> tuple[Tensor, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


@dataclass
class Candidate:
    name: str
    calls: list[Callable[[], Any]]  # one for each input set
    unpack: Callable[[Any], tuple[Tensor, ...]] = _as_tuple  # a result as (Y [batch, heads, rows, size], other outputs)
    context: Callable[[], AbstractContextManager[Any]] = nullcontext  # entered around calls, outside the clock
    own_stream: bool = False  # runs and synchronizes by itself: timed by the wall clock, never captured


def heads_first(heads: int) -> Callable[[Any], tuple[Tensor, ...]]:
    """Unpack [batch, rows, heads * size]."""
    return lambda result: (_as_tuple(result)[0].unflatten(-1, (heads, -1)).transpose(1, 2),)


def heads_merged(x: Tensor) -> Tensor:
    """[batch, heads, rows, size] in [batch, rows, heads, size] storage as [batch, rows, heads * size], without a copy."""
    return x.transpose(1, 2).flatten(2)


def ours(line: Line, sets: list[Inputs]) -> Candidate:
    from torch_onnx_attn import kernel  # the package registers the ops

    calls = [_our_call(line, inputs) for inputs in sets]
    context = partial(kernel, line.kernel) if line.kernel else nullcontext
    return Candidate("ours", calls, heads_first(line.q_heads) if line.call == "mha" else _as_tuple, context)


def _our_call(line: Line, inputs: Inputs) -> Callable[[], Any]:
    ops = torch.ops.onnx_attn
    if line.call == "tensor_scatter_":
        return partial(ops.tensor_scatter_.default, inputs.cache, inputs.q, inputs.positions)
    if line.call == "mha":
        query, key, value = (heads_merged(x) for x in (inputs.q, inputs.k, inputs.v))
        return partial(ops.mha.default, query, key, value, None, inputs.key_lengths, num_heads=line.q_heads)

    attributes: dict[str, Any] = {}
    if line.causal:
        attributes["is_causal"] = True
    if line.softcap:
        attributes["softcap"] = line.softcap
    if line.window >= 0:
        attributes["left_window_size"] = line.window
    tensors = (inputs.q, inputs.k, inputs.v)
    if line.call == "attention_cached":
        return partial(ops.attention_cached.default, *tensors, inputs.past_key, inputs.past_value, inputs.positions, **attributes)
    if line.call == "attention.kv":
        return partial(ops.attention.kv, *tensors, inputs.mask, past_key=inputs.past_key, past_value=inputs.past_value, **attributes)
    if inputs.lengths is not None:
        attributes["nonpad_kv_seqlen"] = inputs.lengths
    if line.call == "attention.qk":
        return partial(ops.attention.qk, *tensors, inputs.mask, qk_matmul_output_mode=line.mode, **attributes)
    return partial(ops.attention.default, *tensors, inputs.mask, **attributes)


def ours_plain(line: Line, sets: list[Inputs]) -> Candidate:
    """The same step without mask, window, softcap and lengths."""
    plain = replace(line, mask="", window=-1, softcap=0.0, causal=False, lengths=None)
    bare = [Inputs(inputs.q, inputs.k, inputs.v) for inputs in sets]
    return replace(ours(plain, bare), name="ours_plain")


def ours_exact(line: Line, sets: list[Inputs]) -> Candidate:
    """The same step on buffers that end where the keys do."""
    assert isinstance(line.lengths, int)
    cut = slice(0, line.lengths)
    exact = replace(line, kv_len=line.lengths, lengths=None)
    bare = [Inputs(inputs.q, inputs.k[:, :, cut].contiguous(), inputs.v[:, :, cut].contiguous()) for inputs in sets]
    return replace(ours(exact, bare), name="ours_exact")
