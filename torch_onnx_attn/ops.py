"""The documented Python entry points: thin functions over ``torch.ops.onnx_attn`` that choose the overload and name the outputs.

Shapes use B = batch, Hq = query heads, Hkv = key/value heads (Hq a multiple of Hkv), L = query rows, S = key rows of this call,
P = past rows, T = P + S, D = head size, Dv = value head size. Every illegal call raises ``RuntimeError`` naming the argument.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class AttentionOutput(NamedTuple):
    """What :func:`attention` returns; outputs that were not asked for are ``None``."""

    Y: Tensor
    present_key: Tensor | None = None
    present_value: Tensor | None = None
    qk_matmul_output: Tensor | None = None


class MultiHeadAttentionOutput(NamedTuple):
    """What :func:`mha` returns; outputs that were not asked for are ``None``."""

    output: Tensor
    present_key: Tensor | None = None
    present_value: Tensor | None = None
    qk: Tensor | None = None


def attention(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    attn_mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    nonpad_kv_seqlen: Tensor | None = None,
    *,
    is_causal: bool = False,
    kv_num_heads: int = 0,
    q_num_heads: int = 0,
    qk_matmul_output_mode: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    left_window_size: int = -1,
    right_window_size: int = -1,
) -> AttentionOutput:
    """ai.onnx::Attention, opsets 23 to 25 (source: the ONNX operator text; ``torch_onnx_attn.reference`` spells it out).

    ``Y = softmax(softcap(scale * Q K^T) + mask) V`` for each head. The argument list is a superset of
    ``torch.onnx.ops.attention``. Scores and sums are float32 (float64 for float64 inputs or ``softmax_precision=11``).

    Args:
        Q: ``[B, Hq, L, D]``, or ``[B, L, Hq * D]`` with both head counts given. float16, bfloat16, float32 or float64.
        K: ``[B, Hkv, S, D]`` or ``[B, S, Hkv * D]``, of Q's dtype. Query head h reads head ``h // (Hq // Hkv)``.
        V: ``[B, Hkv, S, Dv]`` or ``[B, S, Hkv * Dv]``; may be of another floating dtype.
        attn_mask: aligned right to ``[B, Hq, L, T]``; axes other than the last may be 1. bool: True keeps. Other types are added
            to the scores, integers too. A last axis shorter than T disallows the keys past it.
        past_key, past_value: ``[B, Hkv, P, D]`` and ``[B, Hkv, P, Dv]``, given together; P may be 0. Attention then sees
            ``past ++ K`` and the presents are returned.
        nonpad_kv_seqlen: int64 ``[B]``: keys at or past this count never contribute, whatever they hold. Not with a past.
        is_causal: query i sees key j when ``j <= i + offset``. The offset is P with a past, ``nonpad_kv_seqlen[b] - L`` with
            lengths, else 0 (top-left).
        kv_num_heads, q_num_heads: needed for 3-D inputs only.
        qk_matmul_output_mode: ask for the scores ``[B, Hq, L, T]``: 0 scaled product, 1 after softcap, 2 after mask, 3 weights.
        scale: None means ``1 / sqrt(D)``; 0 is a real scale.
        softcap: ``softcap * tanh(score / softcap)`` before the mask; 0 means none.
        softmax_precision: 1, 10, 11 or 16 (ONNX types); only 11 (double) changes the arithmetic.
        left_window_size, right_window_size: how many keys before and after position ``i + offset`` count; -1 means all.

    Returns:
        AttentionOutput. Y is ``[B, L, Hq * Dv]`` for 3-D inputs, else ``[B, Hq, L, Dv]`` stored in Q's axis order. Rows without an
        allowed key are 0. Outputs never alias inputs.

    Raises:
        RuntimeError: naming the argument, what was given and what is allowed.
    """
    ops = torch.ops.onnx_attn.attention
    attributes = {
        "is_causal": is_causal,
        "q_num_heads": q_num_heads or 0,
        "kv_num_heads": kv_num_heads or 0,
        "scale": scale,
        "softcap": softcap,
        "softmax_precision": softmax_precision,
        "left_window_size": left_window_size,
        "right_window_size": right_window_size,
    }
    if past_key is None and past_value is not None:
        raise RuntimeError("past_key: is missing; past_key and past_value must be given together")
    if past_key is None:
        if qk_matmul_output_mode is None:
            return AttentionOutput(ops.default(Q, K, V, attn_mask, nonpad_kv_seqlen=nonpad_kv_seqlen, **attributes))
        Y, scores = ops.qk(Q, K, V, attn_mask, nonpad_kv_seqlen=nonpad_kv_seqlen, qk_matmul_output_mode=qk_matmul_output_mode, **attributes)
        return AttentionOutput(Y, None, None, scores)
    cache = {"past_key": past_key, "past_value": past_value, "nonpad_kv_seqlen": nonpad_kv_seqlen}
    if qk_matmul_output_mode is None:
        return AttentionOutput(*ops.kv(Q, K, V, attn_mask, **cache, **attributes))
    return AttentionOutput(*ops.kv_qk(Q, K, V, attn_mask, **cache, qk_matmul_output_mode=qk_matmul_output_mode, **attributes))


def mha(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    bias: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    attention_bias: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    past_sequence_length: Tensor | None = None,
    cache_indirection: Tensor | None = None,
    *,
    num_heads: int,
    mask_filter_value: float = -10000.0,
    scale: float = 0.0,
    unidirectional: bool = False,
    output_qk: bool = False,
) -> MultiHeadAttentionOutput:
    """com.microsoft::MultiHeadAttention, opset 1 (source: ONNX Runtime's contrib operator, its CPU kernel's values).

    Args:
        query: ``[B, L, N * D]``, or packed ``[B, L, N, 3, D]`` with key and value absent. float16, bfloat16 or float32.
        key: ``[B, S, N * D]``, ``[B, N, S, D]``, or packed with the values as ``[B, S, N, 2, D]``.
        value: ``[B, S, N * Dv]``, or ``[B, N, S, D]`` with a 4-D key.
        bias: ``[N*D + N*D + N*Dv]``, added to query, key and value (only the query's part acts with a 4-D key).
        key_padding_mask: int32, int64 or bool: ``[B]`` key lengths, ``[3B + 2]`` (its first B numbers are lengths), ``[B, T]`` or
            ``[B, L, T]`` (kept where > 0). Other keys get ``mask_filter_value`` *added* to their score.
        attention_bias: ``[B or 1, N or 1, L, T]``, added to the scores.
        past_key, past_value: ``[B, N, P, D]``, given together. The result then has the presents.
        past_sequence_length: one int32 or int64: past_key and past_value are buffers ``[B, N, capacity, D]`` of which this many rows
            are in use. **They are written in place** at the following S rows, and no present is returned.
        cache_indirection: int32 or int64 ``[B / beams, beams, capacity]``, with past_sequence_length: which beam each past row comes from.
        num_heads: N.
        mask_filter_value: what a padded key gets added.
        scale: 0 means ``1 / sqrt(D)``.
        unidirectional: query l sees key t when ``t <= T - L + l`` (bottom-right).
        output_qk: also return the masked scores ``[B, N, L, T]`` before softmax. Not with past_sequence_length.

    Returns:
        MultiHeadAttentionOutput; output is ``[B, L, N * Dv]``. A row with no finite score is 0 (ONNX Runtime: NaN).

    Raises:
        RuntimeError: naming the argument, what was given and what is allowed.
    """
    ops = torch.ops.onnx_attn.mha
    inputs = (query, key, value, bias, key_padding_mask, attention_bias)
    attributes = {
        "num_heads": num_heads,
        "scale": scale,
        "mask_filter_value": mask_filter_value,
        "unidirectional": unidirectional,
    }
    if past_key is None:
        if past_value is not None:
            raise RuntimeError("past_key: is missing; past_key and past_value must be given together")
        # As in ONNX Runtime, past_sequence_length and cache_indirection mean nothing without a past.
        if not output_qk:
            return MultiHeadAttentionOutput(ops.default(*inputs, **attributes))
        output, qk = ops.qk(*inputs, output_qk=True, **attributes)
        return MultiHeadAttentionOutput(output, None, None, qk)
    cache = {"past_key": past_key, "past_value": past_value}
    if past_sequence_length is not None:
        if output_qk:
            raise RuntimeError("output_qk: cannot be combined with past_sequence_length")
        if past_value is None:
            raise RuntimeError("past_value: is missing; past_key and past_value must be given together")
        shared = {"past_sequence_length": past_sequence_length, "cache_indirection": cache_indirection}
        return MultiHeadAttentionOutput(ops.shared(*inputs, **cache, **shared, **attributes))
    if not output_qk:
        return MultiHeadAttentionOutput(*ops.kv(*inputs, **cache, **attributes))
    return MultiHeadAttentionOutput(*ops.kv_qk(*inputs, **cache, output_qk=True, **attributes))


def tensor_scatter(
    past_cache: Tensor, update: Tensor, write_indices: Tensor | None = None, *, axis: int = -2, circular: bool = False
) -> Tensor:
    """ONNX TensorScatter-24: a copy of ``past_cache`` with ``update`` written along ``axis`` from ``write_indices[b]`` on.

    Args:
        past_cache: ``[B, ...]`` of any dtype, 2 to 8 axes.
        update: like past_cache, with at most as many rows on ``axis``.
        write_indices: int64 ``[B]``, None means 0. On CUDA it is never read by the host: rows that do not fit are dropped.
        axis: any but the batch axis 0.
        circular: wrap positions around the end of the axis.
    """
    return torch.ops.onnx_attn.tensor_scatter.default(past_cache, update, write_indices, axis=axis, circular=circular)  # type: ignore[no-any-return]


def tensor_scatter_(cache: Tensor, update: Tensor, write_indices: Tensor | None = None, *, axis: int = -2, circular: bool = False) -> None:
    """:func:`tensor_scatter` in place: writes only the updated rows of ``cache``. Returns nothing."""
    torch.ops.onnx_attn.tensor_scatter_.default(cache, update, write_indices, axis=axis, circular=circular)


def attention_cached(
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
    """Writes K and V into static caches and attends to everything up to there, with all lengths on the device.

    The same as TensorScatter of K and V at ``cache_lengths``, then Attention with ``nonpad_kv_seqlen = cache_lengths + S``, which is
    how it exports. ``cache_lengths`` itself is not advanced.

    Args:
        Q, K, V: as for :func:`attention`; S new rows.
        key_cache, value_cache: ``[B, Hkv, capacity, D]`` and ``[B, Hkv, capacity, Dv]``, **written in place**. Different storage,
            unit last stride.
        cache_lengths: int64 or int32 ``[B]``: rows in use before this call. On CUDA, rows that do not fit are dropped.
        attn_mask and attributes: as for :func:`attention`; masks align to the capacity.

    Returns:
        Y as for :func:`attention`.
    """
    return torch.ops.onnx_attn.attention_cached.default(  # type: ignore[no-any-return]
        Q,
        K,
        V,
        key_cache,
        value_cache,
        cache_lengths,
        attn_mask=attn_mask,
        is_causal=is_causal,
        q_num_heads=q_num_heads,
        kv_num_heads=kv_num_heads,
        scale=scale,
        softcap=softcap,
        softmax_precision=softmax_precision,
        left_window_size=left_window_size,
        right_window_size=right_window_size,
    )


def valid_kv_length(attn_mask: Tensor) -> Tensor:
    """The number of keys that a mask uses: its last allowed key plus 1, from the last query row, over all heads.

    Args:
        attn_mask: 1 to 4 axes aligned right to ``[B, Hq, L, T]``; bool (True keeps) or floating (above -1000 keeps).

    Returns:
        int64 ``[B]`` on the mask's device, or ``[1]`` when the mask has no batch axis; ready for ``nonpad_kv_seqlen``.
    """
    return torch.ops.onnx_attn.valid_kv_length.default(attn_mask)  # type: ignore[no-any-return]
