"""Fake (meta) kernels: the shapes, dtypes and strides of every output, for torch.compile, torch.export and AOTInductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from .fake_checks import (
    Size,
    check,
    check_attention,
    check_caches,
    check_devices,
    check_last_axes,
    check_mha,
    check_rank,
    check_scatter,
    heads_of,
    mha_sizes,
)
from .fake_written import check_written


def _register(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.onnx_attn, packet), overload or "default")
    arguments = op._schema.arguments
    names = [argument.name for argument in arguments]
    required = [argument.name for argument in arguments if isinstance(argument.type, torch.TensorType)]
    written = [argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def fake(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(names, args, strict=False)) | kwargs
            for name in required:
                check(given.get(name) is not None, f"{name}: is None; a tensor is required")
            tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
            check_devices(tensors)
            if packet == "mha":
                check_mha(given)
            outputs = function(*args, **kwargs)
            if written:
                read = {name: tensor for name, tensor in tensors.items() if name not in written}
                check_written({name: tensors[name] for name in written}, read)
            return outputs

        return torch.library.register_fake(f"onnx_attn::{name}", fake)  # type: ignore[no-any-return]

    return decorate


# ------------------------------------------------------------------------------------------------ ai.onnx::Attention


def _output(Q: Tensor, V: Tensor, q_num_heads: int, kv_num_heads: int) -> Tensor:
    """Y: 3-D for 3-D inputs, else 4-D in Q's axis order in memory."""
    if Q.dim() == 3:
        return Q.new_empty(Q.shape[0], Q.shape[1], q_num_heads * (V.shape[2] // kv_num_heads))
    batch, heads, rows, _ = Q.shape
    columns = V.shape[3]
    # Without a unit last axis the kernel reads a contiguous copy of Q.
    is_read_in_place = guard_or_false(Q.shape[3] <= 1) or guard_or_false(Q.stride(3) == 1)
    if is_read_in_place and guard_or_false(Q.stride(1) < Q.stride(2)):
        return Q.new_empty(batch, rows, heads, columns).transpose(1, 2)
    return Q.new_empty(batch, heads, rows, columns)


def _present(past: Tensor, incoming: Tensor, name: str, kv_num_heads: int) -> Tensor:
    check_rank(past, name, 4)
    heads, rows, columns = heads_of(incoming, kv_num_heads)
    return incoming.new_empty(incoming.shape[0], heads, past.shape[2] + rows, columns)


def _scores(Q: Tensor, K: Tensor, past_len: Size, q_num_heads: int, kv_num_heads: int) -> Tensor:
    heads, q_len, _ = heads_of(Q, q_num_heads)
    _, kv_len, _ = heads_of(K, kv_num_heads)
    return Q.new_empty(Q.shape[0], heads, q_len, past_len + kv_len)


@_register("attention")
def _attention(Q, K, V, attn_mask=None, *, nonpad_kv_seqlen=None, q_num_heads=0, kv_num_heads=0, **attributes):  # type: ignore[no-untyped-def]
    check_attention(Q, K, V, attn_mask, q_num_heads, kv_num_heads, nonpad_kv_seqlen, **attributes)
    return _output(Q, V, q_num_heads, kv_num_heads)


@_register("attention.kv")
def _attention_kv(Q, K, V, attn_mask=None, *, past_key, past_value=None, q_num_heads=0, kv_num_heads=0, **attributes):  # type: ignore[no-untyped-def]
    check(past_value is not None, "past_value: is missing; past_key and past_value must be given together")
    past = {"past_key": past_key, "past_value": past_value}
    check_attention(Q, K, V, attn_mask, q_num_heads, kv_num_heads, past=past, **attributes)
    Y = _output(Q, V, q_num_heads, kv_num_heads)
    return Y, _present(past_key, K, "past_key", kv_num_heads), _present(past_value, V, "past_value", kv_num_heads)


@_register("attention.qk")
def _attention_qk(Q, K, V, attn_mask=None, *, q_num_heads=0, kv_num_heads=0, **attributes):  # type: ignore[no-untyped-def]
    check_attention(Q, K, V, attn_mask, q_num_heads, kv_num_heads, **attributes)
    return _output(Q, V, q_num_heads, kv_num_heads), _scores(Q, K, 0, q_num_heads, kv_num_heads)


@_register("attention.kv_qk")
def _attention_kv_qk(Q, K, V, attn_mask=None, *, past_key, past_value=None, q_num_heads=0, kv_num_heads=0, **attributes):  # type: ignore[no-untyped-def]
    heads = {"q_num_heads": q_num_heads, "kv_num_heads": kv_num_heads}
    outputs = _attention_kv(Q, K, V, attn_mask, past_key=past_key, past_value=past_value, **heads, **attributes)
    return (*outputs, _scores(Q, K, past_key.shape[2], q_num_heads, kv_num_heads))


@_register("attention.lse")
def _attention_lse(Q, K, V, attn_mask=None, *, q_num_heads=0, kv_num_heads=0, **attributes):  # type: ignore[no-untyped-def]
    check_attention(Q, K, V, attn_mask, q_num_heads, kv_num_heads, **attributes)
    heads, q_len, _ = heads_of(Q, q_num_heads)
    lse = Q.new_empty(Q.shape[0], heads, q_len, dtype=torch.float32)
    return _output(Q, V, q_num_heads, kv_num_heads), lse


@_register("attention_cached")
def _attention_cached(Q, K, V, key_cache, value_cache, cache_lengths, *, q_num_heads=0, kv_num_heads=0, **attributes):  # type: ignore[no-untyped-def]
    attn_mask = attributes.pop("attn_mask", None)
    check_rank(key_cache, "key_cache", 4)
    caches = {"key_cache": key_cache, "value_cache": value_cache}
    check_attention(Q, K, V, attn_mask, q_num_heads, kv_num_heads, past=caches, capacity=key_cache.shape[2], **attributes)
    check_caches(K, kv_num_heads, caches, cache_lengths)
    return _output(Q, V, q_num_heads, kv_num_heads)


# ------------------------------------------------------------------------------------------------ com.microsoft::MultiHeadAttention


def _mha_output(query: Tensor, key: Tensor | None, value: Tensor | None, num_heads: int) -> Tensor:
    _, _, v_head_size = mha_sizes(query, key, value, num_heads)
    return query.new_empty(query.shape[0], query.shape[1], num_heads * v_head_size)


def _mha_present(query: Tensor, key: Tensor | None, value: Tensor | None, past_key: Tensor, past_value: Tensor | None, num_heads: int):  # type: ignore[no-untyped-def]
    check(past_value is not None, "past_value: is missing; past_key and past_value must be given together")
    check_rank(past_key, "past_key", 4)
    new_len, head_size, v_head_size = mha_sizes(query, key, value, num_heads)
    total = past_key.shape[2] + new_len
    shape = (query.shape[0], num_heads, total)
    return query.new_empty(*shape, head_size), query.new_empty(*shape, v_head_size)


def _mha_qk(query: Tensor, key: Tensor | None, value: Tensor | None, past_len: Size, num_heads: int) -> Tensor:
    new_len, _, _ = mha_sizes(query, key, value, num_heads)
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
    check_last_axes({"past_key": past_key, "past_value": past_value})
    return _mha_output(query, key, value, num_heads)


@_register("mha.shared_functional")
def _mha_shared_functional(query, key=None, value=None, *inputs, past_key, past_value, past_sequence_length, num_heads, **attributes):  # type: ignore[no-untyped-def]
    present = past_key.new_empty(past_key.shape), past_value.new_empty(past_value.shape)
    return _mha_output(query, key, value, num_heads), *present


# ------------------------------------------------------------------------------------------------ caches


@_register("tensor_scatter")
def _tensor_scatter(past_cache, update, write_indices=None, *, axis=-2, circular=False):  # type: ignore[no-untyped-def]
    check_scatter(past_cache, "past_cache", update, write_indices, axis)
    return past_cache.new_empty(past_cache.shape)


@_register("tensor_scatter_")
def _tensor_scatter_in_place(cache, update, write_indices=None, *, axis=-2, circular=False):  # type: ignore[no-untyped-def]
    check_scatter(cache, "cache", update, write_indices, axis)
    return None


@_register("valid_kv_length")
def _valid_kv_length(attn_mask):  # type: ignore[no-untyped-def]
    check_rank(attn_mask, "attn_mask", 1, 2, 3, 4)
    return attn_mask.new_empty(attn_mask.shape[0] if attn_mask.dim() == 4 else 1, dtype=torch.int64)
