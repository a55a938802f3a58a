"""The in-place ops said with pure ones, for the ONNX exporter, which has no translation for an op that writes its inputs.

Eager calls and compiled graphs never come here: the mutable ops have kernels of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _implement(name: str, body: Callable[..., Any]) -> None:
    """Shows the body while torch.onnx.export runs and at no other time.

    A plain CompositeImplicitAutograd registration would not do: torch.compile takes every mutable op apart that has one, and the
    pure form copies each cache twice per step.
    """
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.onnx_attn, packet), overload or "default")

    def body_for_the_exporter(*args: Any, **kwargs: Any) -> Any:
        return body(*args, **kwargs) if torch.onnx.is_in_onnx_export() else NotImplemented

    op.py_impl(torch._C.DispatchKey.CompositeImplicitAutograd)(body_for_the_exporter)


def _tensor_scatter_in_place(
    cache: Tensor, update: Tensor, write_indices: Tensor | None = None, *, axis: int = -2, circular: bool = False
) -> None:
    cache.copy_(torch.ops.onnx_attn.tensor_scatter(cache, update, write_indices, axis=axis, circular=circular))


def _as_cache_rows(tensor: Tensor, heads: int) -> Tensor:
    """[batch, rows, heads * columns] as [batch, heads, rows, columns]; 4-D tensors are that already."""
    if tensor.dim() == 4:
        return tensor
    batch, rows, hidden = tensor.shape
    return tensor.reshape(batch, rows, heads, hidden // heads).transpose(1, 2)


def _as_hidden(tensor: Tensor) -> Tensor:
    """[batch, heads, rows, columns] as [batch, rows, heads * columns]."""
    batch, heads, rows, columns = tensor.shape
    return tensor.transpose(1, 2).reshape(batch, rows, heads * columns)


def _attention_cached(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cache_lengths: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    q_num_heads: int = 0,
    kv_num_heads: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    left_window_size: int = -1,
    right_window_size: int = -1,
) -> Tensor:
    ops = torch.ops.onnx_attn
    start = cache_lengths.to(torch.int64)
    kv_heads = key_cache.shape[1]
    new_k, new_v = _as_cache_rows(K, kv_heads), _as_cache_rows(V, kv_heads)
    keys = ops.tensor_scatter(key_cache, new_k, start, axis=2)
    values = ops.tensor_scatter(value_cache, new_v, start, axis=2)
    key_cache.copy_(keys)
    value_cache.copy_(values)
    queries = _as_cache_rows(Q, q_num_heads) if Q.dim() == 3 else Q
    Y = ops.attention.default(
        queries,
        keys,
        values,
        attn_mask,
        nonpad_kv_seqlen=start + new_k.shape[2],
        is_causal=is_causal,
        scale=scale,
        softcap=softcap,
        softmax_precision=softmax_precision,
        left_window_size=left_window_size,
        right_window_size=right_window_size,
    )
    return _as_hidden(Y) if Q.dim() == 3 else Y


def _mha_shared(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    bias: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    attention_bias: Tensor | None = None,
    *,
    past_key: Tensor,
    past_value: Tensor,
    past_sequence_length: Tensor,
    cache_indirection: Tensor | None = None,
    num_heads: int,
    scale: float = 0.0,
    mask_filter_value: float = -10000.0,
    unidirectional: bool = False,
) -> Tensor:
    output, present_key, present_value = torch.ops.onnx_attn.mha.shared_functional(
        query,
        key,
        value,
        bias,
        key_padding_mask,
        attention_bias,
        past_key=past_key,
        past_value=past_value,
        past_sequence_length=past_sequence_length,
        cache_indirection=cache_indirection,
        num_heads=num_heads,
        scale=scale,
        mask_filter_value=mask_filter_value,
        unidirectional=unidirectional,
    )
    past_key.copy_(present_key)
    past_value.copy_(present_value)
    return output  # type: ignore[no-any-return]


_implement("tensor_scatter_", _tensor_scatter_in_place)
_implement("attention_cached", _attention_cached)
_implement("mha.shared", _mha_shared)
