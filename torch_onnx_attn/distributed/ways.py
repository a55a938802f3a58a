"""In which ways each op can be split without communication: which axis of which argument, and what the arguments become on a rank.

A batch entry, and a head with its key/value head, need nothing from the others; that is all there is. Which way is open depends on
shapes and head counts only, never on what a flag or a number like is_causal or softcap says.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Given = dict[str, Any]  # the arguments of a call by name, without those that were left out


@dataclass(frozen=True)
class Part:
    """Which piece of an axis of `size` a rank has."""

    index: int
    count: int
    begin: int
    end: int
    size: int


@dataclass(frozen=True)
class Way:
    """One way to split a call. Arguments and outputs without an axis here are whole on every rank."""

    size: int  # of what is split: batch entries, heads, rows
    inputs: dict[str, int]
    outputs: tuple[int | None, ...]
    divisor: int | None = None  # the number of pieces must divide this; None: pieces may differ in size, or be empty
    localize: Callable[[Given, Part], Given] = field(default=lambda local, _part: local)


Ways = dict[str, Way]
BROADCAST = ("attn_mask", "attention_bias")  # an axis of 1 serves everyone, so that a piece of 1 would too


def is_open(way: Way, given: Given) -> bool:
    """Whether sizes along the axes that this way splits belong together, so that every rank's part is legal only if the whole is.

    A call whose sizes disagree goes whole to every rank, where the op says what is wrong; cut, it could be legal on some of them.
    """
    for name, axis in way.inputs.items():
        tensor = given[name]
        if axis >= tensor.dim():
            return False
        size = tensor.shape[axis]
        if size != way.size and (way.divisor is None or name in BROADCAST or size % way.divisor):
            return False
    return True


# ---------------------------------------------------------------------------------------------------------------------
# ai.onnx::Attention


def _attention(given: Given, extra_outputs: tuple[str, ...] = ()) -> Ways:
    Q, K = given["Q"], given["K"]
    heads_axis = 1 if Q.dim() == 4 else 2
    q_heads = Q.shape[1] if Q.dim() == 4 else given.get("q_num_heads", 0)
    kv_heads = K.shape[1] if K.dim() == 4 else given.get("kv_num_heads", 0)
    caches = [name for name in ("past_key", "past_value", "key_cache", "value_cache") if given.get(name) is not None]
    batch = {name: 0 for name in ("Q", "K", "V", "nonpad_kv_seqlen", "cache_lengths", *caches) if given.get(name) is not None}
    heads = {"Q": heads_axis}
    is_multi_query = kv_heads == 1
    if not is_multi_query:
        heads |= {"K": heads_axis, "V": heads_axis} | dict.fromkeys(caches, 1)
    if given.get("attn_mask") is not None:
        _add_broadcast(given["attn_mask"], "attn_mask", batch, heads)

    by_heads: dict[str, int | None] = {"present": None if is_multi_query else 1, "scores": 1, "lse": 1}

    def localize(local: Given, part: Part) -> Given:
        for name, is_split in (("q_num_heads", True), ("kv_num_heads", not is_multi_query)):
            if local.get(name) and is_split:
                local[name] //= part.count
        return local

    ways = {"batch": Way(Q.shape[0], batch, (0,) * (1 + len(extra_outputs)))}
    if q_heads > 0 and kv_heads > 0:
        divisor = q_heads if is_multi_query else math.gcd(q_heads, kv_heads)
        outputs = (heads_axis, *(by_heads[name] for name in extra_outputs))
        ways["heads"] = Way(q_heads, heads, outputs, divisor, localize)
    return ways


def _add_broadcast(mask: Tensor, name: str, batch: dict[str, int], heads: dict[str, int]) -> None:
    """The axes of a mask that aligns right to [batch, heads, rows, keys]; an axis of 1 serves every rank."""
    for axis, split in ((mask.dim() - 4, batch), (mask.dim() - 3, heads)):
        if axis >= 0 and mask.shape[axis] != 1:
            split[name] = axis


# ---------------------------------------------------------------------------------------------------------------------
# com.microsoft::MultiHeadAttention


def _mha(given: Given, extra_outputs: int = 0) -> Ways:
    query, num_heads = given["query"], given["num_heads"]
    batch, heads = {"query": 0}, {"query": 2}
    for name in ("key", "value"):
        if given.get(name) is not None:
            batch[name], heads[name] = 0, 1 if given[name].dim() == 4 else 2
    for name in ("past_key", "past_value"):
        if given.get(name) is not None:
            batch[name], heads[name] = 0, 1
    if given.get("attention_bias") is not None:
        _add_broadcast(given["attention_bias"], "attention_bias", batch, heads)
    mask = given.get("key_padding_mask")
    has_starts = mask is not None and mask.dim() == 1 and mask.shape[0] == 3 * query.shape[0] + 2
    if mask is not None and not has_starts:
        batch["key_padding_mask"] = 0
    groups = None
    if given.get("cache_indirection") is not None:
        batch["cache_indirection"] = 0
        groups = given["cache_indirection"].shape[0]  # the beams of a group stay together

    def localize_batch(local: Given, part: Part) -> Given:
        if has_starts:
            local["key_padding_mask"] = local["key_padding_mask"][part.begin : part.end]  # its first B numbers are the lengths
        return local

    def localize_heads(local: Given, part: Part) -> Given:
        local["num_heads"] //= part.count
        if local.get("bias") is not None:
            local["bias"] = _bias_of_heads(local["bias"], given, part)
        return local

    ways = {"batch": Way(query.shape[0], batch, (0,) * (1 + extra_outputs), groups, localize_batch)}
    if num_heads > 0 and _has_bias_of_heads(given):
        ways["heads"] = Way(num_heads, heads, (2,) + (1,) * extra_outputs, num_heads, localize_heads)
    return ways


def _has_bias_of_heads(given: Given) -> bool:
    """Whether the projection bias, if there is one, can be cut into heads."""
    bias, query = given.get("bias"), given["query"]
    if bias is None or bias.dim() != 1:
        return bias is None
    v_hidden = bias.shape[0] - 2 * _hidden(query, given["num_heads"])
    return bool(v_hidden > 0 and v_hidden % given["num_heads"] == 0)


def _hidden(query: Tensor, num_heads: int) -> int:
    """Columns of all heads of a query [batch, rows, hidden] or [batch, rows, heads, 3, head_size]."""
    return num_heads * query.shape[4] if query.dim() == 5 else query.shape[-1]


def _bias_of_heads(bias: Tensor, given: Given, part: Part) -> Tensor:
    """The projection bias [hidden + hidden + v_hidden] of some heads: a piece of each of the three."""
    hidden = _hidden(given["query"], given["num_heads"])
    pieces = bias.split([hidden, hidden, bias.shape[0] - 2 * hidden])
    return torch.cat([piece.chunk(part.count)[part.index] for piece in pieces])


# ---------------------------------------------------------------------------------------------------------------------
# Caches


def _tensor_scatter(given: Given, cache: str, outputs: int) -> Ways:
    """Any axis but the one that is written along."""
    tensor = given[cache]
    if tensor.dim() == 0:
        return {}
    written = given.get("axis", -2) % tensor.dim()
    ways = {}
    for axis in range(tensor.dim()):
        inputs = {cache: axis, "update": axis}
        if axis == 0 and given.get("write_indices") is not None:
            inputs["write_indices"] = 0
        if axis != written:
            ways[f"axis {axis}"] = Way(tensor.shape[axis], inputs, (axis,) * outputs)
    return ways


def _valid_kv_length(given: Given) -> Ways:
    mask = given["attn_mask"]
    return {"batch": Way(mask.shape[0], {"attn_mask": 0}, (0,))} if mask.dim() == 4 and mask.shape[0] != 1 else {}


_PRESENTS = ("present", "present")
WAYS: dict[str, Callable[[Given], Ways]] = {
    "attention": _attention,
    "attention.kv": lambda given: _attention(given, _PRESENTS),
    "attention.qk": lambda given: _attention(given, ("scores",)),
    "attention.kv_qk": lambda given: _attention(given, (*_PRESENTS, "scores")),
    "attention.lse": lambda given: _attention(given, ("lse",)),
    "attention_cached": _attention,
    "mha": _mha,
    "mha.kv": lambda given: _mha(given, 2),
    "mha.qk": lambda given: _mha(given, 1),
    "mha.kv_qk": lambda given: _mha(given, 3),
    "mha.shared": _mha,
    "mha.shared_functional": lambda given: _mha(given, 2),
    "tensor_scatter": lambda given: _tensor_scatter(given, "past_cache", 1),
    "tensor_scatter_": lambda given: _tensor_scatter(given, "cache", 0),
    "valid_kv_length": _valid_kv_length,
}
