"""Fake (meta) kernels: the shapes, dtypes and strides of every output, for torch.compile, torch.export and AOTInductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

Size = Any  # int or torch.SymInt


def _register(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return torch.library.register_fake(f"onnx_attn::{name}")  # type: ignore[no-any-return]


def _check_rank(tensor: Tensor, name: str, *ranks: int) -> None:
    torch._check(tensor.dim() in ranks, lambda: f"{name}: has shape {list(tensor.shape)}; it must have {' or '.join(map(str, ranks))} axes")


# ------------------------------------------------------------------------------------------------ ai.onnx::Attention


def _output(Q: Tensor, V: Tensor, q_num_heads: int, kv_num_heads: int) -> Tensor:
    """Y: 3-D for 3-D inputs, else 4-D in Q's axis order in memory."""
    _check_rank(Q, "Q", 3, 4)
    _check_rank(V, "V", Q.dim())
    if Q.dim() == 3:
        torch._check(q_num_heads > 0 and kv_num_heads > 0, lambda: "q_num_heads, kv_num_heads: must be positive for 3-D inputs")
        return Q.new_empty(Q.shape[0], Q.shape[1], q_num_heads * (V.shape[2] // kv_num_heads))
    batch, heads, rows, _ = Q.shape
    columns = V.shape[3]
    # Without a unit last axis the kernel reads a contiguous copy of Q.
    is_read_in_place = guard_or_false(Q.shape[3] <= 1) or guard_or_false(Q.stride(3) == 1)
    if is_read_in_place and guard_or_false(Q.stride(1) < Q.stride(2)):
        return Q.new_empty(batch, rows, heads, columns).transpose(1, 2)
    return Q.new_empty(batch, heads, rows, columns)


def _heads_of(tensor: Tensor, heads: int) -> tuple[Size, Size, Size]:
    """(heads, rows, columns per head) of a 3-D or 4-D Q, K or V."""
    if tensor.dim() == 3:
        return heads, tensor.shape[1], tensor.shape[2] // heads
    return tensor.shape[1], tensor.shape[2], tensor.shape[3]


def _present(past: Tensor, incoming: Tensor, name: str, kv_num_heads: int) -> Tensor:
    _check_rank(past, name, 4)
    heads, rows, columns = _heads_of(incoming, kv_num_heads)
    return incoming.new_empty(incoming.shape[0], heads, past.shape[2] + rows, columns)


def _scores(Q: Tensor, K: Tensor, past_len: Size, q_num_heads: int, kv_num_heads: int) -> Tensor:
    heads, q_len, _ = _heads_of(Q, q_num_heads)
    _, kv_len, _ = _heads_of(K, kv_num_heads)
    return Q.new_empty(Q.shape[0], heads, q_len, past_len + kv_len)


@_register("attention")
def _attention(Q, K, V, attn_mask=None, *, nonpad_kv_seqlen=None, q_num_heads=0, kv_num_heads=0, **attributes):  # type: ignore[no-untyped-def]
    return _output(Q, V, q_num_heads, kv_num_heads)


@_register("attention.kv")
def _attention_kv(Q, K, V, attn_mask=None, *, past_key, past_value=None, q_num_heads=0, kv_num_heads=0, **attributes):  # type: ignore[no-untyped-def]
    torch._check(past_value is not None, lambda: "past_value: is missing; past_key and past_value must be given together")
    Y = _output(Q, V, q_num_heads, kv_num_heads)
    return Y, _present(past_key, K, "past_key", kv_num_heads), _present(past_value, V, "past_value", kv_num_heads)


@_register("attention.qk")
def _attention_qk(Q, K, V, attn_mask=None, *, q_num_heads=0, kv_num_heads=0, **attributes):  # type: ignore[no-untyped-def]
    return _output(Q, V, q_num_heads, kv_num_heads), _scores(Q, K, 0, q_num_heads, kv_num_heads)


@_register("attention.kv_qk")
def _attention_kv_qk(Q, K, V, attn_mask=None, *, past_key, past_value=None, q_num_heads=0, kv_num_heads=0, **attributes):  # type: ignore[no-untyped-def]
    outputs = _attention_kv(Q, K, V, past_key=past_key, past_value=past_value, q_num_heads=q_num_heads, kv_num_heads=kv_num_heads)
    return (*outputs, _scores(Q, K, past_key.shape[2], q_num_heads, kv_num_heads))


@_register("attention.lse")
def _attention_lse(Q, K, V, attn_mask=None, *, q_num_heads=0, kv_num_heads=0, **attributes):  # type: ignore[no-untyped-def]
    heads, q_len, _ = _heads_of(Q, q_num_heads)
    lse = Q.new_empty(Q.shape[0], heads, q_len, dtype=torch.float32)
    return _output(Q, V, q_num_heads, kv_num_heads), lse


@_register("attention_cached")
def _attention_cached(Q, K, V, key_cache, value_cache, cache_lengths, *, q_num_heads=0, kv_num_heads=0, **attributes):  # type: ignore[no-untyped-def]
    return _output(Q, V, q_num_heads, kv_num_heads)


# ------------------------------------------------------------------------------------------------ com.microsoft::MultiHeadAttention


def _mha_sizes(query: Tensor, key: Tensor | None, value: Tensor | None, num_heads: int) -> tuple[Size, Size, Size]:
    """(new keys, head size, value head size) in any of the four layouts."""
    _check_rank(query, "query", 3, 5)
    torch._check(num_heads > 0, lambda: f"num_heads: is {num_heads}; it must be positive")
    if query.dim() == 5:
        return query.shape[1], query.shape[4], query.shape[4]
    torch._check(key is not None, lambda: "key: is missing; only a packed 5-D query goes without")
    assert key is not None
    _check_rank(key, "key", 3, 4, 5)
    head_size = query.shape[2] // num_heads
    if key.dim() == 5:
        return key.shape[1], head_size, head_size
    torch._check(value is not None, lambda: "value: is missing; it must be given with key")
    assert value is not None
    _check_rank(value, "value", key.dim())
    if key.dim() == 4:
        return key.shape[2], head_size, head_size
    return key.shape[1], head_size, value.shape[2] // num_heads


def _mha_output(query: Tensor, key: Tensor | None, value: Tensor | None, num_heads: int) -> Tensor:
    _, _, v_head_size = _mha_sizes(query, key, value, num_heads)
    return query.new_empty(query.shape[0], query.shape[1], num_heads * v_head_size)


def _mha_present(query: Tensor, key: Tensor | None, value: Tensor | None, past_key: Tensor, past_value: Tensor | None, num_heads: int):  # type: ignore[no-untyped-def]
    torch._check(past_value is not None, lambda: "past_value: is missing; past_key and past_value must be given together")
    _check_rank(past_key, "past_key", 4)
    new_len, head_size, v_head_size = _mha_sizes(query, key, value, num_heads)
    total = past_key.shape[2] + new_len
    shape = (query.shape[0], num_heads, total)
    return query.new_empty(*shape, head_size), query.new_empty(*shape, v_head_size)


def _mha_qk(query: Tensor, key: Tensor | None, value: Tensor | None, past_len: Size, num_heads: int) -> Tensor:
    new_len, _, _ = _mha_sizes(query, key, value, num_heads)
    return query.new_empty(query.shape[0], num_heads, query.shape[1], past_len + new_len)


@_register("mha")
def _mha(query, key=None, value=None, *inputs, num_heads, **attributes):  # type: ignore[no-untyped-def]
    return _mha_output(query, key, value, num_heads)


@_register("mha.kv")
def _mha_kv(query, key=None, value=None, *inputs, past_key, past_value=None, num_heads, **attributes):  # type: ignore[no-untyped-def]
    return _mha_output(query, key, value, num_heads), *_mha_present(query, key, value, past_key, past_value, num_heads)


@_register("mha.qk")
def _mha_with_qk(query, key=None, value=None, *inputs, output_qk, num_heads, **attributes):  # type: ignore[no-untyped-def]
    return _mha_output(query, key, value, num_heads), _mha_qk(query, key, value, 0, num_heads)


@_register("mha.kv_qk")
def _mha_kv_with_qk(query, key=None, value=None, *inputs, past_key, past_value=None, output_qk, num_heads, **attributes):  # type: ignore[no-untyped-def]
    present = _mha_present(query, key, value, past_key, past_value, num_heads)
    return _mha_output(query, key, value, num_heads), *present, _mha_qk(query, key, value, past_key.shape[2], num_heads)


@_register("mha.shared")
def _mha_shared(query, key=None, value=None, *inputs, past_key, past_value, past_sequence_length, num_heads, **attributes):  # type: ignore[no-untyped-def]
    return _mha_output(query, key, value, num_heads)


@_register("mha.shared_functional")
def _mha_shared_functional(query, key=None, value=None, *inputs, past_key, past_value, past_sequence_length, num_heads, **attributes):  # type: ignore[no-untyped-def]
    present = past_key.new_empty(past_key.shape), past_value.new_empty(past_value.shape)
    return _mha_output(query, key, value, num_heads), *present


# ------------------------------------------------------------------------------------------------ caches


@_register("tensor_scatter")
def _tensor_scatter(past_cache, update, write_indices=None, *, axis=-2, circular=False):  # type: ignore[no-untyped-def]
    return past_cache.new_empty(past_cache.shape)


@_register("tensor_scatter_")
def _tensor_scatter_in_place(cache, update, write_indices=None, *, axis=-2, circular=False):  # type: ignore[no-untyped-def]
    return None


@_register("valid_kv_length")
def _valid_kv_length(attn_mask):  # type: ignore[no-untyped-def]
    _check_rank(attn_mask, "attn_mask", 1, 2, 3, 4)
    return attn_mask.new_empty(attn_mask.shape[0] if attn_mask.dim() == 4 else 1, dtype=torch.int64)
