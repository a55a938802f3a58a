"""Attention sinks (GPT-OSS): one more score for each head, which takes part in the softmax and has no value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .tracing import is_exporting

ops = torch.ops.onnx_attn.attention


def attend_with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    lengths: Tensor | None,
    sinks: Tensor,
    options: dict[str, Any],
    *,
    with_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """Output ``[B, Hq, L, Dv]`` and, if wanted, weights ``[B, Hq, L, S]`` of attention with sinks ``[Hq]``; the rest as for the op.

    The sink adds exp(sink) to a sum whose logarithm the op returns, so it scales each row by sigmoid(log-sum-exp - sink).
    """
    if is_exporting():
        return _with_sink_key(query, key, value, attn_mask, lengths, sinks, options, with_weights)
    inputs = (query, key, value, attn_mask)
    output, lse = ops.lse(*inputs, nonpad_kv_seqlen=lengths, return_lse=True, **options)
    share = torch.sigmoid(lse - sinks.float()[:, None])[..., None]
    weights = None
    if with_weights:
        _, weights = ops.qk(*inputs, nonpad_kv_seqlen=lengths, qk_matmul_output_mode=3, **options)
        weights = (weights * share).to(query.dtype)
    return (output * share).to(query.dtype), weights


def _with_sink_key(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    lengths: Tensor | None,
    sinks: Tensor,
    options: dict[str, Any],
    with_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """What ONNX can say, which has no log-sum-exp: a last key and value of zeros, whose score the mask raises to the sink.

    Costs a copy of keys and values and a floating mask of L * S numbers, into which causality, windows and lengths go.
    """
    q_heads, q_len, kv_len = query.shape[1], query.shape[2], key.shape[2]
    bias = _as_bias(query, kv_len, attn_mask, lengths, options)
    bias = bias.expand(-1, q_heads, q_len, -1)
    last = sinks.to(bias.dtype)[None, :, None, None].expand(bias.shape[0], -1, q_len, -1)
    bias = torch.cat([bias, last], -1)
    rest = {"scale": options["scale"], "softcap": options["softcap"]}
    inputs = (query, _with_zero_row(key), _with_zero_row(value), bias)
    if not with_weights:
        return ops.default(*inputs, **rest), None
    output, weights = ops.qk(*inputs, qk_matmul_output_mode=3, **rest)
    return output, weights[..., :-1]


def _with_zero_row(cache: Tensor) -> Tensor:
    return torch.cat([cache, torch.zeros_like(cache[:, :, :1])], 2)


def _as_bias(query: Tensor, kv_len: int, attn_mask: Tensor | None, lengths: Tensor | None, options: dict[str, Any]) -> Tensor:
    """Everything that hides keys, as a floating mask ``[B or 1, Hq or 1, L, S]`` of query's dtype."""
    q_len, device = query.shape[2], query.device
    rows = torch.arange(q_len, device=device)[:, None]
    keys = torch.arange(kv_len, device=device)[None, :]
    if lengths is not None:
        rows = rows + (lengths[:, None, None, None] - q_len)
    distance = rows - keys
    visible = torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
    if lengths is not None:
        visible = visible & (keys < lengths[:, None, None, None])
    if options["is_causal"]:
        visible = visible & (distance >= 0)
    if options["left_window_size"] >= 0:
        visible = visible & (distance <= options["left_window_size"])
    if options["right_window_size"] >= 0:
        visible = visible & (-distance <= options["right_window_size"])
    zero, hidden = query.new_zeros(()), query.new_full((), -torch.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        visible = visible & attn_mask
    bias = torch.where(visible, zero, hidden)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        bias = bias + attn_mask
    return bias if bias.dim() == 4 else bias[None, None]
