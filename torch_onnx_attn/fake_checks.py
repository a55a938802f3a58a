"""What the kernels check of sizes, types and attributes, for calls that are traced and exported without ever running.

Symbolic sizes are left to the kernels, so as to add no guard to a graph.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Size = Any  # int or torch.SymInt
Heads = tuple[Size, Size, Size]  # heads, rows, columns of each head

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int32, torch.int64)


def check(claim: bool, message: str) -> None:
    if not claim:
        raise RuntimeError(message)


def check_rank(tensor: Tensor, name: str, *ranks: int) -> None:
    check(tensor.dim() in ranks, f"{name}: has shape {_text(tensor)}; it must have {' or '.join(map(str, ranks))} axes")


def check_devices(tensors: dict[str, Tensor]) -> None:
    """Meta tensors beside real ones would come here too; nothing could be computed from them."""
    (first, reference), *others = tensors.items()
    for name, tensor in others:
        place = tensor.device
        check(place == reference.device, f"{name}: is on {place}, but {first} is on {reference.device}; all tensors must be on one device")


def differ(first: Size, second: Size) -> bool:
    """Whether two sizes are known to differ."""
    return isinstance(first, int) and isinstance(second, int) and first != second


def is_indivisible(size: Size, divisor: Size) -> bool:
    """Whether a size is known not to be a multiple."""
    return isinstance(size, int) and isinstance(divisor, int) and (size % divisor != 0 if divisor else size != 0)


def heads_of(tensor: Tensor, heads: int) -> Heads:
    """Of a 3-D or 4-D Q, K or V."""
    if tensor.dim() == 3:
        return heads, tensor.shape[1], tensor.shape[2] // heads
    return tensor.shape[1], tensor.shape[2], tensor.shape[3]


def _text(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _check_dtype(tensor: Tensor, name: str, dtype: torch.dtype, other: str) -> None:
    check(tensor.dtype == dtype, f"{name}: has dtype {_name(tensor.dtype)}, but {other} has {_name(dtype)}; the two must be the same")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_shape(tensor: Tensor, name: str, meaning: str, *sizes: Size | None) -> None:
    """``sizes``: None where any size will do."""
    fits = tensor.dim() == len(sizes) and not any(differ(size, wanted) for size, wanted in zip(tensor.shape, sizes, strict=True))
    wanted = ", ".join("any" if size is None else str(size) for size in sizes)
    check(fits, f"{name}: has shape {_text(tensor)}; it must be [{meaning}] = [{wanted}]")


# ------------------------------------------------------------------------------------------------ ai.onnx::Attention


def _check_attributes(
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    left_window_size: int = -1,
    right_window_size: int = -1,
    qk_matmul_output_mode: int = 0,
    return_lse: bool = True,
) -> None:
    check(scale is None or (math.isfinite(scale) and scale >= 0), f"scale: is {scale}; it must be a finite number >= 0")
    check(math.isfinite(softcap) and softcap >= 0, f"softcap: is {softcap}; it must be a finite number >= 0")
    check(softmax_precision in (None, 1, 10, 11, 16), f"softmax_precision: is {softmax_precision}; allowed are 1, 10, 11 and 16")
    check(left_window_size >= -1, f"left_window_size: is {left_window_size}; it must be >= -1")
    check(right_window_size >= -1, f"right_window_size: is {right_window_size}; it must be >= -1")
    check(0 <= qk_matmul_output_mode <= 3, f"qk_matmul_output_mode: is {qk_matmul_output_mode}; allowed are 0 to 3")
    check(return_lse, "return_lse: is false; leave it out for Y alone")


def check_attention(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    attn_mask: Tensor | None,
    q_num_heads: int,
    kv_num_heads: int,
    nonpad_kv_seqlen: Tensor | None = None,
    past: dict[str, Tensor] | None = None,
    capacity: Size = None,
    **attributes: Any,
) -> None:
    """``past``: past_key and past_value, or the two caches, by name. ``capacity``: rows of caches, in which K and V will lie."""
    _check_attributes(**attributes)
    for name, heads in (("q_num_heads", q_num_heads), ("kv_num_heads", kv_num_heads)):
        check(heads >= 0, f"{name}: is {heads}; it must be >= 0 (0 means not given)")
    for name, tensor in (("Q", Q), ("K", K), ("V", V)):
        check(tensor.dtype in _FLOATING, f"{name}: has dtype {_name(tensor.dtype)}; allowed are float16, bfloat16, float32 and float64")
        check_rank(tensor, name, *((3, 4) if tensor is Q else (Q.dim(),)))
        check(not differ(tensor.shape[0], Q.shape[0]), f"{name}: has batch {tensor.shape[0]}, but Q has {Q.shape[0]}")
    _check_dtype(K, "K", Q.dtype, "Q")
    _check_head_counts(Q, K, V, q_num_heads, kv_num_heads)
    (q_heads, q_len, head_size), (kv_heads, kv_len, k_head_size) = heads_of(Q, q_num_heads), heads_of(K, kv_num_heads)
    v_heads, v_len, v_head_size = heads_of(V, kv_num_heads)
    check(not differ(head_size, k_head_size), f"K: has head size {k_head_size}, but Q has {head_size}")
    check(not differ(v_heads, kv_heads), f"V: has {v_heads} heads, but K has {kv_heads}")
    check(not differ(kv_len, v_len), f"V: has {v_len} rows, but K has {kv_len}")
    for name, size in (("Q", head_size), ("V", v_head_size)):
        check(not (isinstance(size, int) and size == 0), f"{name}: has head size 0; it must be at least 1")
    are_groups = not is_indivisible(q_heads, kv_heads)
    check(are_groups, f"Q: has {q_heads} heads, which is not a multiple of the {kv_heads} heads of K and V")

    total = kv_len
    if past is not None:
        check(nonpad_kv_seqlen is None, "nonpad_kv_seqlen: cannot be combined with past_key and past_value")
        (key_name, key), (value_name, value) = past.items()
        length = "past_len" if capacity is None else "capacity"
        _check_shape(key, key_name, f"batch, kv_heads, {length}, head_size", Q.shape[0], kv_heads, None, head_size)
        _check_shape(value, value_name, f"batch, kv_heads, {length}, v_head_size", Q.shape[0], kv_heads, key.shape[2], v_head_size)
        _check_dtype(key, key_name, K.dtype, "K")
        _check_dtype(value, value_name, V.dtype, "V")
        total = key.shape[2] + kv_len if capacity is None else capacity
    if nonpad_kv_seqlen is not None:
        check(nonpad_kv_seqlen.dtype == torch.int64, f"nonpad_kv_seqlen: has dtype {_name(nonpad_kv_seqlen.dtype)}; it must be int64")
        _check_shape(nonpad_kv_seqlen, "nonpad_kv_seqlen", "batch", Q.shape[0])
    if attn_mask is not None:
        _check_mask(attn_mask, (Q.shape[0], q_heads, q_len), total)


def _check_head_counts(Q: Tensor, K: Tensor, V: Tensor, q_num_heads: int, kv_num_heads: int) -> None:
    if Q.dim() == 3:
        for name, heads in (("q_num_heads", q_num_heads), ("kv_num_heads", kv_num_heads)):
            check(heads > 0, f"{name}: is {heads}; 3-D inputs need a positive head count")
        for name, tensor, heads in (("Q", Q, q_num_heads), ("K", K, kv_num_heads), ("V", V, kv_num_heads)):
            width = tensor.shape[2]
            check(not is_indivisible(width, heads), f"{name}: last axis is {width}, which is not a multiple of its {heads} heads")
        return
    check(not q_num_heads or not differ(Q.shape[1], q_num_heads), f"q_num_heads: is {q_num_heads}, but Q has {Q.shape[1]} heads")
    check(not kv_num_heads or not differ(K.shape[1], kv_num_heads), f"kv_num_heads: is {kv_num_heads}, but K has {K.shape[1]} heads")


def _check_mask(attn_mask: Tensor, axes: tuple[Size, ...], total: Size) -> None:
    check(not attn_mask.dtype.is_complex, f"attn_mask: has dtype {_name(attn_mask.dtype)}; allowed are bool, floating and integer types")
    check_rank(attn_mask, "attn_mask", 1, 2, 3, 4)
    columns = attn_mask.shape[-1]
    is_too_long = isinstance(columns, int) and isinstance(total, int) and columns > total
    check(not is_too_long, f"attn_mask: last axis is {columns}, but there are {total} keys; it may be shorter, never longer")
    for size, wanted in zip(reversed(attn_mask.shape[:-1]), reversed(axes), strict=False):
        fits = not differ(size, wanted) or size == 1
        check(fits, f"attn_mask: has shape {_text(attn_mask)}; the axes before the last must be 1 or end {list(axes)}")


def check_caches(K: Tensor, kv_num_heads: int, caches: dict[str, Tensor], cache_lengths: Tensor) -> None:
    """Of attention_cached, beyond what ``check_attention`` finds."""
    check_last_axes(caches)
    check(cache_lengths.dtype in _INTEGERS, f"cache_lengths: has dtype {_name(cache_lengths.dtype)}; it must be int64 or int32")
    _check_shape(cache_lengths, "cache_lengths", "batch", K.shape[0])
    rows, capacity = heads_of(K, kv_num_heads)[1], caches["key_cache"].shape[2]
    check(not _is_more(rows, capacity), f"K: has {rows} rows, but the caches hold only {capacity}")


def check_last_axes(caches: dict[str, Tensor]) -> None:
    """Of [batch, heads, rows, columns] that are written in place."""
    for name, cache in caches.items():
        has_gaps = differ(cache.stride(3), 1) and differ(cache.shape[3], 1)
        check(not has_gaps, f"{name}: last axis has stride {cache.stride(3)}; it must be 1")


def _is_more(first: Size, second: Size) -> bool:
    """Whether a size is known to be larger."""
    return isinstance(first, int) and isinstance(second, int) and first > second


# ------------------------------------------------------------------------------------------------ com.microsoft::MultiHeadAttention


def mha_sizes(query: Tensor, key: Tensor | None, value: Tensor | None, num_heads: int) -> tuple[Size, Size, Size]:
    """(new keys, head size, value head size) in any of the four layouts."""
    check_rank(query, "query", 3, 5)
    check(num_heads > 0, f"num_heads: is {num_heads}; it must be positive")
    if query.dim() == 5:
        return query.shape[1], query.shape[4], query.shape[4]
    check(key is not None, f"key: is missing; only a packed 5-D query goes without, and this one is {_text(query)}")
    assert key is not None
    check_rank(key, "key", 3, 4, 5)
    head_size = query.shape[2] // num_heads
    if key.dim() == 5:
        return key.shape[1], head_size, head_size
    check(value is not None, "value: is missing; it must be given with key")
    assert value is not None
    check_rank(value, "value", key.dim())
    if key.dim() == 4:
        return key.shape[2], head_size, head_size
    return key.shape[1], head_size, value.shape[2] // num_heads


def check_mha(given: dict[str, Any]) -> None:
    """``given``: the arguments of an overload by name."""
    query, num_heads = given["query"], given["num_heads"]
    for name, tensor in ((name, given.get(name)) for name in ("query", "key", "value", "bias", "attention_bias")):
        if tensor is not None:
            _check_mha_dtype(tensor, name, query)
    new_len, head_size, v_head_size = mha_sizes(query, given.get("key"), given.get("value"), num_heads)
    _check_mha_layout(query, given.get("key"), given.get("value"), num_heads, head_size)
    for name, size in (("query", head_size), ("value", v_head_size)):
        check(not (isinstance(size, int) and size == 0), f"{name}: has head size 0; it must be at least 1")
    scale, filter_value = given.get("scale", 0.0), given.get("mask_filter_value", -10000.0)
    check(math.isfinite(scale), f"scale: is {scale}; it must be finite (0 means 1 / sqrt(head size))")
    check(not math.isnan(filter_value), "mask_filter_value: is NaN; it must be a number")

    bias, is_packed = given.get("bias"), query.dim() == 5 or given["key"].dim() == 5
    if bias is not None:
        check(query.dim() == 5 or given["key"].dim() != 5, "bias: cannot be combined with a packed key")
        _check_shape(bias, "bias", "hidden + hidden + v_hidden", num_heads * (2 * head_size + v_head_size))
    total, is_shared = new_len, given.get("past_sequence_length") is not None
    key, value = given.get("past_key"), given.get("past_value")
    if key is not None:
        check(value is not None, "past_value: is missing; past_key and past_value must be given together")
        assert value is not None
        check(not is_packed, "past_key: cannot be combined with a packed query or key")
        for name, cache in (("past_key", key), ("past_value", value)):
            rows = None if cache is key else key.shape[2]
            length = "capacity" if is_shared else "past_len"
            _check_shape(cache, name, f"batch, num_heads, {length}, head_size", query.shape[0], num_heads, rows, head_size)
            _check_dtype(cache, name, query.dtype, "query")
        check(not differ(head_size, v_head_size), f"value: has head size {v_head_size}, but query has {head_size}; with a past they agree")
        total = key.shape[2] + (0 if is_shared else new_len)
        if is_shared:
            _check_shared(given, new_len, total)
    _check_mha_masks(given.get("key_padding_mask"), given.get("attention_bias"), query, num_heads, total, is_shared)


def _check_shared(given: dict[str, Any], new_len: Size, capacity: Size) -> None:
    """Of past and present in one buffer. How much of it is filled is a value, which nobody knows yet."""
    query, key, padding = given["query"], given["key"], given.get("key_padding_mask")
    length, beams = given["past_sequence_length"], given.get("cache_indirection")
    batch = query.shape[0]
    check(not _is_more(new_len, capacity), f"key: has {new_len} rows, but past_key holds only {capacity}")
    check(length.dtype in _INTEGERS, f"past_sequence_length: has dtype {_name(length.dtype)}; it must be int32 or int64")
    is_one = length.dim() <= 1 and not differ(length.numel(), 1)
    check(is_one, f"past_sequence_length: has shape {_text(length)}; it must hold one element, as a scalar or [1]")
    if beams is None:
        return
    check(beams.dtype in _INTEGERS, f"cache_indirection: has dtype {_name(beams.dtype)}; it must be int32 or int64")
    fits = beams.dim() == 3 and not differ(beams.shape[0] * beams.shape[1], batch) and not differ(beams.shape[2], capacity)
    wanted = f"[batch / beams, beams, capacity] with batch {batch} and capacity {capacity}"
    check(fits, f"cache_indirection: has shape {_text(beams)}; it must be {wanted}")
    is_step = isinstance(query.shape[1], int) and query.shape[1] == 1 and differ(batch, 0)
    acts = is_step and key.dim() == 3 and (padding is None or padding.dim() == 2)
    is_one_key = not acts or not differ(new_len, 1)
    check(is_one_key, f"cache_indirection: needs one new key with its one query, but key has {new_len} rows")


def _check_mha_dtype(tensor: Tensor, name: str, query: Tensor) -> None:
    allowed = "float16, bfloat16 and float32"
    check(tensor.dtype in _FLOATING[:3] or tensor is not query, f"{name}: has dtype {_name(tensor.dtype)}; allowed are {allowed}")
    _check_dtype(tensor, name, query.dtype, "query")


def _check_mha_layout(query: Tensor, key: Tensor | None, value: Tensor | None, num_heads: int, head_size: Size) -> None:
    if query.dim() == 5:
        for name, tensor in (("key", key), ("value", value)):
            check(tensor is None, f"{name}: must be absent beside a packed query of shape {_text(query)}")
        return _check_shape(query, "query", "batch, rows, num_heads, 3, head_size", None, None, num_heads, 3, None)
    assert key is not None
    batch, width = query.shape[0], query.shape[2]
    check(not is_indivisible(width, num_heads), f"query: last axis is {width}, which is not a multiple of num_heads = {num_heads}")
    if key.dim() == 5:
        check(value is None, f"value: must be absent beside a packed key of shape {_text(key)}")
        return _check_shape(key, "key", "batch, rows, num_heads, 2, head_size", batch, None, num_heads, 2, head_size)
    assert value is not None
    for name, tensor in (("key", key), ("value", value)):
        check(not differ(tensor.shape[0], batch), f"{name}: has batch {tensor.shape[0]}, but query has {batch}")
    if key.dim() == 4:
        _check_shape(key, "key", "batch, num_heads, kv_len, head_size", batch, num_heads, None, head_size)
        return _check_shape(value, "value", "batch, num_heads, kv_len, head_size", batch, num_heads, key.shape[2], head_size)
    check(not differ(key.shape[2], width), f"key: last axis is {key.shape[2]}, but that of query is {width}")
    check(not differ(value.shape[1], key.shape[1]), f"value: has {value.shape[1]} rows, but key has {key.shape[1]}")
    v_width = value.shape[2]
    check(not is_indivisible(v_width, num_heads), f"value: last axis is {v_width}, which is not a multiple of num_heads = {num_heads}")


def _check_mha_masks(padding: Tensor | None, bias: Tensor | None, query: Tensor, num_heads: int, total: Size, is_shared: bool) -> None:
    """``is_shared``: masks may be as narrow as what is filled of a buffer of ``total`` keys."""
    batch, rows = query.shape[0], query.shape[1]
    keys = f"up to {total}" if is_shared else f"{total}"

    def fits(tensor: Tensor, *leading: Size) -> bool:
        if tensor.dim() != len(leading) + 1 or any(map(differ, leading, tensor.shape)):
            return False
        columns = tensor.shape[-1]
        return not (_is_more(columns, total) if is_shared else differ(columns, total))

    if padding is not None:
        are_lengths = padding.dim() == 1 and not (differ(padding.shape[0], batch) and differ(padding.shape[0], 3 * batch + 2))
        is_mask = padding.dim() > 1 and (fits(padding, batch) or fits(padding, batch, rows))
        wanted = "[batch], [3 * batch + 2], [batch, keys] or [batch, queries, keys]"
        check(
            are_lengths or is_mask,
            f"key_padding_mask: has shape {_text(padding)}; with batch {batch} and {keys} keys it must be {wanted}",
        )
        allowed = _INTEGERS if are_lengths else (*_INTEGERS, torch.bool)
        check(
            padding.dtype in allowed,
            f"key_padding_mask: has dtype {_name(padding.dtype)}; allowed are {[_name(dtype) for dtype in allowed]}",
        )
    if bias is not None:
        broadcast = [wanted if differ(size, 1) else 1 for size, wanted in zip(bias.shape, (batch, num_heads), strict=False)]
        check(
            fits(bias, *broadcast, rows),
            f"attention_bias: has shape {_text(bias)}; it must be [{batch} or 1, {num_heads} or 1, {rows}, {keys}]",
        )


# ------------------------------------------------------------------------------------------------ ai.onnx::TensorScatter


def check_scatter(cache: Tensor, name: str, update: Tensor, write_indices: Tensor | None, axis: int) -> None:
    rank = cache.dim()
    check(2 <= rank <= 8, f"{name}: has shape {_text(cache)}; it must have 2 to 8 axes")
    check(-rank <= axis < rank, f"axis: is {axis}; it must be in [{-rank}, {rank - 1}] for a cache of {rank} axes")
    axis %= rank
    check(axis != 0, "axis: is the batch axis 0; it must be any other")
    _check_dtype(update, "update", cache.dtype, name)
    fits = update.dim() == rank and not any(differ(update.shape[i], cache.shape[i]) for i in range(rank) if i != axis)
    check(fits, f"update: has shape {_text(update)}; it must be that of {name}, {_text(cache)}, but for axis {axis}")
    check(not _is_more(update.shape[axis], cache.shape[axis]), f"update: has {update.shape[axis]} rows, but {name} {cache.shape[axis]}")
    if write_indices is not None:
        check(write_indices.dtype == torch.int64, f"write_indices: has dtype {_name(write_indices.dtype)}; it must be int64")
        _check_shape(write_indices, "write_indices", "batch", cache.shape[0])
