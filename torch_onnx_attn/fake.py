"""Fake (meta) kernels: the shapes, dtypes and strides of every output, for torch.compile, torch.export and AOTInductor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

Size = Any  # int or torch.SymInt


def _register(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.onnx_attn, packet), overload or "default")
    names = [argument.name for argument in op._schema.arguments]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def fake(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(names, args, strict=False)) | kwargs
            _check_devices({name: value for name, value in given.items() if isinstance(value, Tensor)})
            if packet == "mha":
                _check_mha_bias(given)
            return function(*args, **kwargs)

        return torch.library.register_fake(f"onnx_attn::{name}", fake)  # type: ignore[no-any-return]

    return decorate


def _check_rank(tensor: Tensor, name: str, *ranks: int) -> None:
    _check(tensor.dim() in ranks, f"{name}: has shape {list(tensor.shape)}; it must have {' or '.join(map(str, ranks))} axes")


def _check(claim: bool, message: str) -> None:
    if not claim:
        raise RuntimeError(message)


def _check_devices(tensors: dict[str, Tensor]) -> None:
    """Meta tensors beside real ones would come here too; nothing could be computed from them."""
    (first, reference), *others = tensors.items()
    for name, tensor in others:
        place = tensor.device
        _check(place == reference.device, f"{name}: is on {place}, but {first} is on {reference.device}; all tensors must be on one device")


def _differ(first: Size, second: Size) -> bool:
    """Whether two sizes are known to differ; symbolic ones are left to the kernel, so as to add no guard."""
    return isinstance(first, int) and isinstance(second, int) and first != second


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
    """What the kernels check of attributes, for graphs that are traced and exported without ever running."""
    _check(scale is None or (math.isfinite(scale) and scale >= 0), f"scale: is {scale}; it must be a finite number >= 0")
    _check(math.isfinite(softcap) and softcap >= 0, f"softcap: is {softcap}; it must be a finite number >= 0")
    _check(softmax_precision in (None, 1, 10, 11, 16), f"softmax_precision: is {softmax_precision}; allowed are 1, 10, 11 and 16")
    _check(left_window_size >= -1, f"left_window_size: is {left_window_size}; it must be >= -1")
    _check(right_window_size >= -1, f"right_window_size: is {right_window_size}; it must be >= -1")
    _check(0 <= qk_matmul_output_mode <= 3, f"qk_matmul_output_mode: is {qk_matmul_output_mode}; allowed are 0 to 3")
    _check(return_lse, "return_lse: is false; leave it out for Y alone")


def _check_attention(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    attn_mask: Tensor | None,
    q_num_heads: int,
    kv_num_heads: int,
    nonpad_kv_seqlen: Tensor | None = None,
    past_key: Tensor | None = None,
    past_len: Size = 0,
    **attributes: Any,
) -> None:
    _check_attributes(**attributes)
    for name, tensor in (("Q", Q), ("K", K), ("V", V)):
        _check_rank(tensor, name, *((3, 4) if tensor is Q else (Q.dim(),)))
    if Q.dim() == 3:
        _check(q_num_heads > 0 and kv_num_heads > 0, "q_num_heads, kv_num_heads: must be positive for 3-D inputs")
    else:
        _check(not q_num_heads or not _differ(Q.shape[1], q_num_heads), f"q_num_heads: is {q_num_heads}, but Q has {Q.shape[1]} heads")
        _check(not kv_num_heads or not _differ(K.shape[1], kv_num_heads), f"kv_num_heads: is {kv_num_heads}, but K has {K.shape[1]} heads")
    (_, _, head_size), (_, kv_len, k_head_size), (_, v_len, _) = (
        _heads_of(Q, q_num_heads),
        _heads_of(K, kv_num_heads),
        _heads_of(V, kv_num_heads),
    )
    _check(not _differ(head_size, k_head_size), f"K: has head size {k_head_size}, but Q has {head_size}")
    _check(not _differ(kv_len, v_len), f"V: has {v_len} rows, but K has {kv_len}")
    _check(past_key is None or nonpad_kv_seqlen is None, "nonpad_kv_seqlen: cannot be combined with past_key and past_value")
    if attn_mask is not None:
        _check_rank(attn_mask, "attn_mask", 1, 2, 3, 4)
        columns, total = attn_mask.shape[-1], kv_len + (past_key.shape[2] if past_key is not None else past_len)
        too_long = isinstance(columns, int) and isinstance(total, int) and columns > total
        _check(not too_long, f"attn_mask: last axis is {columns}, but there are {total} keys; it may be shorter, never longer")


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
    _check_attention(Q, K, V, attn_mask, q_num_heads, kv_num_heads, nonpad_kv_seqlen, **attributes)
    return _output(Q, V, q_num_heads, kv_num_heads)


@_register("attention.kv")
def _attention_kv(Q, K, V, attn_mask=None, *, past_key, past_value=None, q_num_heads=0, kv_num_heads=0, **attributes):  # type: ignore[no-untyped-def]
    _check(past_value is not None, "past_value: is missing; past_key and past_value must be given together")
    _check_attention(Q, K, V, attn_mask, q_num_heads, kv_num_heads, past_key=past_key, **attributes)
    Y = _output(Q, V, q_num_heads, kv_num_heads)
    return Y, _present(past_key, K, "past_key", kv_num_heads), _present(past_value, V, "past_value", kv_num_heads)


@_register("attention.qk")
def _attention_qk(Q, K, V, attn_mask=None, *, q_num_heads=0, kv_num_heads=0, **attributes):  # type: ignore[no-untyped-def]
    _check_attention(Q, K, V, attn_mask, q_num_heads, kv_num_heads, **attributes)
    return _output(Q, V, q_num_heads, kv_num_heads), _scores(Q, K, 0, q_num_heads, kv_num_heads)


@_register("attention.kv_qk")
def _attention_kv_qk(Q, K, V, attn_mask=None, *, past_key, past_value=None, q_num_heads=0, kv_num_heads=0, **attributes):  # type: ignore[no-untyped-def]
    heads = {"q_num_heads": q_num_heads, "kv_num_heads": kv_num_heads}
    outputs = _attention_kv(Q, K, V, attn_mask, past_key=past_key, past_value=past_value, **heads, **attributes)
    return (*outputs, _scores(Q, K, past_key.shape[2], q_num_heads, kv_num_heads))


@_register("attention.lse")
def _attention_lse(Q, K, V, attn_mask=None, *, q_num_heads=0, kv_num_heads=0, **attributes):  # type: ignore[no-untyped-def]
    _check_attention(Q, K, V, attn_mask, q_num_heads, kv_num_heads, **attributes)
    heads, q_len, _ = _heads_of(Q, q_num_heads)
    lse = Q.new_empty(Q.shape[0], heads, q_len, dtype=torch.float32)
    return _output(Q, V, q_num_heads, kv_num_heads), lse


@_register("attention_cached")
def _attention_cached(Q, K, V, key_cache, value_cache, cache_lengths, *, q_num_heads=0, kv_num_heads=0, **attributes):  # type: ignore[no-untyped-def]
    attn_mask = attributes.pop("attn_mask", None)
    _check_rank(key_cache, "key_cache", 4)
    _, new_len, _ = _heads_of(K, kv_num_heads or 1)
    _check_attention(Q, K, V, attn_mask, q_num_heads, kv_num_heads, past_len=key_cache.shape[2] - new_len, **attributes)
    return _output(Q, V, q_num_heads, kv_num_heads)


# ------------------------------------------------------------------------------------------------ com.microsoft::MultiHeadAttention


def _mha_sizes(query: Tensor, key: Tensor | None, value: Tensor | None, num_heads: int) -> tuple[Size, Size, Size]:
    """(new keys, head size, value head size) in any of the four layouts."""
    _check_rank(query, "query", 3, 5)
    _check(num_heads > 0, f"num_heads: is {num_heads}; it must be positive")
    if query.dim() == 5:
        return query.shape[1], query.shape[4], query.shape[4]
    _check(key is not None, "key: is missing; only a packed 5-D query goes without")
    assert key is not None
    _check_rank(key, "key", 3, 4, 5)
    head_size = query.shape[2] // num_heads
    if key.dim() == 5:
        return key.shape[1], head_size, head_size
    _check(value is not None, "value: is missing; it must be given with key")
    assert value is not None
    _check_rank(value, "value", key.dim())
    if key.dim() == 4:
        return key.shape[2], head_size, head_size
    return key.shape[1], head_size, value.shape[2] // num_heads


def _check_mha_bias(given: dict[str, Any]) -> None:
    bias, query, num_heads = given.get("bias"), given["query"], given["num_heads"]
    if bias is None:
        return
    _check_rank(bias, "bias", 1)
    _, head_size, v_head_size = _mha_sizes(query, given.get("key"), given.get("value"), num_heads)
    expected = num_heads * (2 * head_size + v_head_size)
    _check(
        not _differ(bias.shape[0], expected), f"bias: has shape {list(bias.shape)}; it must be [hidden + hidden + v_hidden] = [{expected}]"
    )


def _mha_output(query: Tensor, key: Tensor | None, value: Tensor | None, num_heads: int) -> Tensor:
    _, _, v_head_size = _mha_sizes(query, key, value, num_heads)
    return query.new_empty(query.shape[0], query.shape[1], num_heads * v_head_size)


def _mha_present(query: Tensor, key: Tensor | None, value: Tensor | None, past_key: Tensor, past_value: Tensor | None, num_heads: int):  # type: ignore[no-untyped-def]
    _check(past_value is not None, "past_value: is missing; past_key and past_value must be given together")
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
