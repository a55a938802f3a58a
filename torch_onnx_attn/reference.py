"""The operators in float64, written like the ONNX text: what every kernel is compared with.

Nothing here is fast, and nothing here shares code with the kernels. Arithmetic is float64 from the first product to the
last sum, with one exception that belongs to the definition: the scores of float32, float16 and bfloat16 inputs are
*specified* to be float32 numbers, so after the bias is added a score is rounded to float32 (`logits_dtype`). The rounding
decides results whenever a large finite bias swallows the scores: a row whose every bias is -1e9 is the mean of the values
for float32 inputs and a softmax of the scores for float64 inputs.

Functions check their arguments only as far as the answer needs. Names in the shapes:

    batch, q_heads, kv_heads, q_len, head_size, v_head_size     as everywhere in this package
    new_len    rows of the incoming K and V
    past_len   rows of past_key and past_value
    kv_len     keys that a query may see: past_len + new_len
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["AttentionResult", "CachedResult", "MhaResult", "attention", "attention_cached", "mha", "tensor_scatter", "valid_kv_length"]

_FLOAT32_LOWEST = torch.finfo(torch.float32).min
_SOFTMAX_PRECISION_DOUBLE = 11  # TensorProto.DOUBLE


class AttentionResult(NamedTuple):
    """What ai.onnx::Attention computes, in float64. Present tensors hold exactly the values of the inputs."""

    Y: Tensor  # [batch, q_heads, q_len, v_head_size], or [batch, q_len, q_heads * v_head_size] for 3-D inputs
    present_key: Tensor  # [batch, kv_heads, kv_len, head_size]
    present_value: Tensor  # [batch, kv_heads, kv_len, v_head_size]
    qk_matmul_output: Tensor | None  # [batch, q_heads, q_len, kv_len], when a mode is given
    lse: Tensor | None  # [batch, q_heads, q_len], when asked for


class MhaResult(NamedTuple):
    """What com.microsoft::MultiHeadAttention computes, in float64."""

    output: Tensor  # [batch, q_len, num_heads * v_head_size]
    present_key: Tensor  # [batch, num_heads, kv_len, head_size]; with a shared buffer, all of its rows
    present_value: Tensor  # [batch, num_heads, kv_len, v_head_size]; likewise
    qk: Tensor | None  # [batch, num_heads, q_len, kv_len], when asked for


class CachedResult(NamedTuple):
    """What attention_cached computes and what it leaves in the caches."""

    Y: Tensor  # float64, shape as in AttentionResult
    key_cache: Tensor  # of the cache's own type
    value_cache: Tensor


# ---------------------------------------------------------------------------------------------------------------------
# ai.onnx::Attention


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
    q_num_heads: int = 0,
    kv_num_heads: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    left_window_size: int = -1,
    right_window_size: int = -1,
    qk_matmul_output_mode: int | None = None,
    return_lse: bool = False,
    logits_dtype: torch.dtype | None = None,
) -> AttentionResult:
    """ai.onnx::Attention, opsets 23 to 25.

    Shapes: Q [batch, q_heads, q_len, head_size], K [batch, kv_heads, new_len, head_size], V [batch, kv_heads, new_len,
    v_head_size], or all three 3-D [batch, length, heads * size] with `q_num_heads` and `kv_num_heads`.
    attn_mask broadcasts to [batch, q_heads, q_len, kv_len] from the right; its last axis may be shorter than kv_len.
    past_key, past_value [batch, kv_heads, past_len, size]. nonpad_kv_seqlen [batch], clamped to 0 ... kv_len.
    """
    three_dimensional = Q.dim() == 3
    if three_dimensional:
        Q, K, V = _split_heads(Q, q_num_heads), _split_heads(K, kv_num_heads), _split_heads(V, kv_num_heads)
    if logits_dtype is None:
        logits_dtype = torch.float64 if Q.dtype == torch.float64 or softmax_precision == _SOFTMAX_PRECISION_DOUBLE else torch.float32

    query, present_key, present_value = Q.double(), K.double(), V.double()
    past_len = 0
    if past_key is not None and past_value is not None:
        past_len = past_key.shape[2]
        present_key = torch.cat((past_key.double(), present_key), dim=2)
        present_value = torch.cat((past_value.double(), present_value), dim=2)
    keys, values = present_key, present_value
    q_heads, q_len, head_size = query.shape[1:]
    kv_len = keys.shape[2]

    # Scale, softcap, bias, softmax: in this order.
    raw = query @ _for_each_query_head(keys, q_heads).transpose(-1, -2) * (1 / math.sqrt(head_size) if scale is None else scale)
    capped = softcap * torch.tanh(raw / softcap) if softcap > 0 else raw

    lengths = None
    offset = torch.full((1,), past_len, device=Q.device)
    if nonpad_kv_seqlen is not None:
        lengths = nonpad_kv_seqlen.clamp(0, kv_len)
        offset = lengths - q_len
    visible = _visible(q_len, kv_len, lengths, offset, is_causal, left_window_size, right_window_size)
    keep, bias = _tensor_mask(attn_mask, kv_len)
    masked = _round(capped + bias, logits_dtype).masked_fill(~(visible & keep), -math.inf)

    weights, lse = _softmax(masked)
    if lengths is not None:  # rows of V past the length may hold NaN, and 0 * NaN is NaN
        padding = torch.arange(kv_len, device=Q.device) >= lengths[:, None]
        values = values.masked_fill(padding[:, None, :, None], 0.0)
    Y = _weighted_sum(weights, _for_each_query_head(values, q_heads), lse)

    scores = None if qk_matmul_output_mode is None else (raw, capped, masked, weights)[qk_matmul_output_mode]
    return AttentionResult(_join_heads(Y) if three_dimensional else Y, present_key, present_value, scores, lse if return_lse else None)


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
) -> CachedResult:
    """Write K and V at rows [cache_lengths[b], cache_lengths[b] + new_len), then attend with everything up to there.

    Shapes: key_cache [batch, kv_heads, capacity, head_size], value_cache [batch, kv_heads, capacity, v_head_size],
    cache_lengths [batch]; the others as for `attention`. The arguments are left alone; the new caches are returned.
    """
    three_dimensional = Q.dim() == 3
    if three_dimensional:
        Q, K, V = _split_heads(Q, q_num_heads), _split_heads(K, kv_num_heads), _split_heads(V, kv_num_heads)
    key_cache = tensor_scatter(key_cache, K, cache_lengths, axis=2)
    value_cache = tensor_scatter(value_cache, V, cache_lengths, axis=2)
    Y = attention(
        Q,
        key_cache,
        value_cache,
        attn_mask,
        nonpad_kv_seqlen=cache_lengths + K.shape[2],
        is_causal=is_causal,
        scale=scale,
        softcap=softcap,
        softmax_precision=softmax_precision,
        left_window_size=left_window_size,
        right_window_size=right_window_size,
    ).Y
    return CachedResult(_join_heads(Y) if three_dimensional else Y, key_cache, value_cache)


# ---------------------------------------------------------------------------------------------------------------------
# com.microsoft::MultiHeadAttention


def mha(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    bias: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    attention_bias: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    past_sequence_length: Tensor | int | None = None,
    cache_indirection: Tensor | None = None,
    *,
    num_heads: int,
    scale: float = 0.0,
    mask_filter_value: float = -10000.0,
    unidirectional: bool = False,
    output_qk: bool = False,
    logits_dtype: torch.dtype | None = None,
) -> MhaResult:
    """com.microsoft::MultiHeadAttention, opset 1.

    Shapes: query [batch, q_len, num_heads * head_size] with key and value [batch, new_len, num_heads * size], or key and
    value [batch, num_heads, new_len, head_size], or key [batch, new_len, num_heads, 2, head_size] holding both; or query
    [batch, q_len, num_heads, 3, head_size] holding all three. bias [2 * hidden + v_hidden]. key_padding_mask [batch],
    [3 * batch + 2], [batch, kv_len] or [batch, q_len, kv_len]. attention_bias [batch or 1, num_heads or 1, q_len, kv_len].
    past_key, past_value [batch, num_heads, past_len, size]; with `past_sequence_length` they are buffers of `capacity`
    rows of which that many are filled, masks may be of another width (columns that are missing count as masked), and
    cache_indirection is [batch / beams, beams, capacity]. Beams act on single-token steps with 3-D keys and no mask but
    one of [batch, kv_len]; elsewhere they are ignored, as ONNX Runtime ignores them.

    A masked key gets `mask_filter_value` added to its score. A key that causality forbids is excluded; in `qk` it shows
    the score plus the lowest float32, as ONNX Runtime shows it. A row without a finite score is zero.
    """
    if logits_dtype is None:
        logits_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    q, k, v = _mha_heads(query, key, value, bias, num_heads)
    q_len, new_len = q.shape[2], k.shape[2]

    filled = None
    if past_key is not None and past_value is not None:
        if past_sequence_length is None:
            present_key, present_value = torch.cat((past_key.double(), k), dim=2), torch.cat((past_value.double(), v), dim=2)
        else:
            filled = int(past_sequence_length)
            present_key, present_value = past_key.double().clone(), past_value.double().clone()
            present_key[:, :, filled : filled + new_len] = k
            present_value[:, :, filled : filled + new_len] = v
    else:
        present_key, present_value = k, v
    kv_len = present_key.shape[2] if filled is None else filled + new_len
    keys, values = present_key[:, :, :kv_len], present_value[:, :, :kv_len]
    beams_act = q_len == 1 and key is not None and key.dim() == 3 and (key_padding_mask is None or key_padding_mask.dim() == 2)
    if filled is not None and cache_indirection is not None and beams_act:
        keys, values = (_through_beams(x, cache_indirection, filled) for x in (keys, values))

    product = q @ keys.transpose(-1, -2) * (1 / math.sqrt(q.shape[3]) if scale == 0 else scale)
    if attention_bias is not None:
        product = product + _with_columns(attention_bias.double(), kv_len, -math.inf)
    padded = product
    if key_padding_mask is not None:
        padded = product + torch.where(_kept_by_padding_mask(key_padding_mask, len(query), kv_len), 0.0, float(mask_filter_value))
    logits = shown = _round(padded, logits_dtype)
    if unidirectional:
        allowed = torch.arange(kv_len, device=q.device) <= torch.arange(q_len, device=q.device)[:, None] + (kv_len - q_len)
        logits = logits.masked_fill(~allowed, -math.inf)
        shown = torch.where(allowed, shown, _round(product + _FLOAT32_LOWEST, logits_dtype))

    weights, lse = _softmax(logits)
    output = _join_heads(_weighted_sum(weights, values, lse))
    return MhaResult(output, present_key, present_value, shown if output_qk else None)


def _mha_heads(
    query: Tensor, key: Tensor | None, value: Tensor | None, bias: Tensor | None, num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Any layout to float64 q, k, v [batch, num_heads, length, size], with the projection bias added."""
    if query.dim() == 5:  # packed QKV [batch, q_len, num_heads, 3, head_size]
        q, k, v = (query[:, :, :, part].transpose(1, 2) for part in range(3))
    else:
        q = _split_heads(query, num_heads)
        assert key is not None
        if key.dim() == 5:  # packed KV [batch, new_len, num_heads, 2, head_size]
            k, v = (key[:, :, :, part].transpose(1, 2) for part in range(2))
        else:
            assert value is not None
            k, v = (x if x.dim() == 4 else _split_heads(x, num_heads) for x in (key, value))
    q, k, v = q.double(), k.double(), v.double()
    if bias is not None:
        hidden = num_heads * q.shape[3]
        per_head = [part.double().reshape(num_heads, 1, -1) for part in (bias[:hidden], bias[hidden : 2 * hidden], bias[2 * hidden :])]
        q = q + per_head[0]
        if key is None or key.dim() != 4:  # keys and values that come with their heads split are taken as they are
            k, v = k + per_head[1], v + per_head[2]
    return q, k, v


def _kept_by_padding_mask(mask: Tensor, batch: int, kv_len: int) -> Tensor:
    """bool [batch, 1, 1 or q_len, kv_len] for any of the four forms of key_padding_mask."""
    if mask.dim() == 1:  # [batch], or [3 * batch + 2] whose first `batch` numbers are the key lengths
        return (torch.arange(kv_len, device=mask.device) < mask[:batch, None])[:, None, None, :]
    kept = _with_columns(mask > 0, kv_len, False)
    return kept[:, None, None, :] if mask.dim() == 2 else kept[:, None, :, :]


def _with_columns(x: Tensor, columns: int, missing: float) -> Tensor:
    """x with its last axis cut or, with the value `missing`, extended to `columns`."""
    return torch.nn.functional.pad(x, (0, columns - x.shape[-1]), value=missing)


def _through_beams(present: Tensor, cache_indirection: Tensor, filled: int) -> Tensor:
    """Past row j of entry b read from the entry of b's group that cache_indirection names; later rows are b's own.

    Shapes: present [batch, num_heads, kv_len, size]; cache_indirection [batch / beams, beams, capacity].
    """
    batch, beams = present.shape[0], cache_indirection.shape[1]
    group_start = torch.arange(batch, device=present.device) // beams * beams
    source = group_start[:, None] + cache_indirection.reshape(batch, -1)[:, :filled]  # [batch, filled]
    rows = torch.arange(filled, device=present.device)
    past = present[source, :, rows].permute(0, 2, 1, 3)  # [batch, filled, num_heads, size] before the permute
    return torch.cat((past, present[:, :, filled:]), dim=2)


# ---------------------------------------------------------------------------------------------------------------------
# Caches


def tensor_scatter(
    past_cache: Tensor, update: Tensor, write_indices: Tensor | None = None, *, axis: int = -2, circular: bool = False
) -> Tensor:
    """ai.onnx::TensorScatter: the cache with `update` written along `axis` from row write_indices[b] on, in the cache's type.

    Shapes: past_cache [batch, ...], update the same but for `axis`, write_indices [batch] (absent: zeros). Circular
    positions are modulo the axis length; linear rows that fall outside are dropped.
    """
    axis = axis % past_cache.dim()
    capacity, rows = past_cache.shape[axis], update.shape[axis]
    present = past_cache.clone()
    starts = [0] * len(past_cache) if write_indices is None else write_indices.tolist()
    for entry, start in enumerate(starts):
        for row in range(rows):
            target = (start + row) % capacity if circular else start + row
            if 0 <= target < capacity:
                present[entry].select(axis - 1, target).copy_(update[entry].select(axis - 1, row))
    return present


def valid_kv_length(attn_mask: Tensor) -> Tensor:
    """One past the last key that the mask's last query row allows in any head: int64 [batch of the mask, 1 if it has none].

    A key is allowed where a bool mask is True or a number is above -1000.
    """
    mask = attn_mask.reshape((1,) * (4 - attn_mask.dim()) + attn_mask.shape)
    allowed = (mask if mask.dtype == torch.bool else mask > -1000)[:, :, -1].any(dim=1)  # [batch, columns]
    position = torch.arange(1, allowed.shape[-1] + 1, device=mask.device)
    return (allowed * position).amax(dim=-1) if allowed.shape[-1] else torch.zeros(len(mask), dtype=torch.int64, device=mask.device)


# ---------------------------------------------------------------------------------------------------------------------
# The pieces


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """[batch, length, heads * size] to [batch, heads, length, size]."""
    return x.reshape(x.shape[0], x.shape[1], heads, x.shape[2] // heads).transpose(1, 2)


def _join_heads(x: Tensor) -> Tensor:
    """[batch, heads, length, size] to [batch, length, heads * size]."""
    return x.transpose(1, 2).flatten(2)


def _for_each_query_head(x: Tensor, q_heads: int) -> Tensor:
    """[batch, kv_heads, length, size] to [batch, q_heads, length, size]: query head h reads kv head h // group."""
    return x.repeat_interleave(q_heads // max(x.shape[1], 1), dim=1)


def _visible(q_len: int, kv_len: int, lengths: Tensor | None, offset: Tensor, is_causal: bool, left: int, right: int) -> Tensor:
    """bool [batch or 1, 1, q_len, kv_len]: the keys that length, causality and windows leave. Query i stands at i + offset."""
    key = torch.arange(kv_len, device=offset.device)
    position = (torch.arange(q_len, device=offset.device) + offset[:, None])[:, :, None]  # [batch or 1, q_len, 1]
    visible = torch.ones((len(offset), q_len, kv_len), dtype=torch.bool, device=offset.device)
    if lengths is not None:
        visible &= key < lengths[:, None, None]
    if is_causal:
        visible &= key <= position
    if left >= 0:
        visible &= position - key <= left
    if right >= 0:
        visible &= key - position <= right
    return visible[:, None]


def _tensor_mask(attn_mask: Tensor | None, kv_len: int) -> tuple[Tensor, Tensor]:
    """attn_mask as (keep, bias), each broadcastable to [batch, q_heads, q_len, kv_len]. Keys without a column are not kept."""
    if attn_mask is None:
        return torch.tensor(True), torch.tensor(0.0, dtype=torch.float64)
    if attn_mask.dtype == torch.bool:
        return _with_columns(attn_mask, kv_len, False), torch.tensor(0.0, dtype=torch.float64)
    present = torch.arange(kv_len, device=attn_mask.device) < attn_mask.shape[-1]
    return present, _with_columns(attn_mask.double(), kv_len, 0.0)  # numbers are added, integers too


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 values that `dtype` can hold; beyond its range they become infinite."""
    return x.to(dtype).double()


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and log-sum-exp over the last axis. A row without a finite score has zero weights and -inf."""
    if logits.shape[-1] == 0:
        return logits, logits.new_full(logits.shape[:-1], -math.inf)
    row_max = logits.amax(dim=-1, keepdim=True)
    empty = row_max == -math.inf
    exponentials = torch.exp(logits - row_max.masked_fill(empty, 0.0))
    row_sum = exponentials.sum(dim=-1, keepdim=True)
    weights = exponentials / row_sum.masked_fill(empty, 1.0)
    lse = torch.where(empty, -math.inf, row_max + torch.log(row_sum))
    return weights, lse.squeeze(-1)


def _weighted_sum(weights: Tensor, values: Tensor, lse: Tensor) -> Tensor:
    """weights @ values; a row without a finite score is zero whatever the values hold."""
    return (weights @ values).masked_fill((lse == -math.inf)[..., None], 0.0)
