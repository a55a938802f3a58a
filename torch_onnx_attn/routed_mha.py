"""torch.nn.functional.multi_head_attention_forward said with torch.ops.onnx_attn.attention, or the reason why not.

This is the function behind torch.nn.MultiheadAttention. Both functions here have its signature. It is time-major: query is
[L, B, embed_dim] or [L, embed_dim], key and value [S, B, ...] or [S, ...]; the module transposes batch-first inputs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional

from .routed_sdpa import differ, is_exporting, mask_dtype_fits, mask_with_rows, reason_of_tensors


def reason_to_leave(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> str | None:
    """Why a call cannot be routed, None if it can. What torch refuses is left as well, so that its own error is raised."""
    if bias_k is not None or bias_v is not None:
        return "bias_k and bias_v (add_bias_kv) append a key; these ops have no such input"
    if add_zero_attn:
        return "add_zero_attn appends a key; these ops have no such option"
    if static_k is not None or static_v is not None:
        return "static_k and static_v replace projected keys and values; that is not routed"
    if training and dropout_p != 0.0:
        return f"dropout_p is {dropout_p} in training; these ops have no dropout"
    weights = (in_proj_weight, in_proj_bias, q_proj_weight, k_proj_weight, v_proj_weight, out_proj_weight, out_proj_bias)
    reason = reason_of_tensors(query, key, value, key_padding_mask, attn_mask, *weights)
    if reason is not None:
        return reason
    if not (query.dim() == key.dim() == value.dim() and query.dim() in (2, 3)):
        return "query, key and value do not all have 2 axes, or all 3"
    if num_heads <= 0 or embed_dim_to_check % num_heads != 0 or query.shape[-1] != embed_dim_to_check:
        return "embed_dim, num_heads and query do not go together, which torch refuses"
    if attn_mask is None and is_causal:
        return "is_causal is a hint about attn_mask, which is missing; torch refuses that"
    if _hint_replaces_mask(is_causal, key_padding_mask, need_weights):
        attn_mask = None
    batch = query.shape[1:-1]
    allowed: dict[str, tuple[Tensor | None, list[list[Any]]]] = {
        "key_padding_mask": (key_padding_mask, [[*batch, key.shape[0]]]),
        "attn_mask": (attn_mask, [[query.shape[0], key.shape[0]], [math.prod(batch) * num_heads, query.shape[0], key.shape[0]]]),
    }
    for name, (mask, shapes) in allowed.items():
        if mask is None:
            continue
        if all(len(shape) != mask.dim() or any(map(differ, mask.shape, shape)) for shape in shapes):
            return f"{name} has another shape than torch allows"
        if not mask_dtype_fits(mask, query) and (need_weights or mask.dtype != torch.float32):
            return f"{name} is {mask.dtype}, which torch refuses with a query of {query.dtype}"
    return None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The call with its attention on ``torch.ops.onnx_attn.attention``, the weights as score mode 3."""
    is_batched = query.dim() == 3
    weights = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else in_proj_weight
    Q, K, V = (x.transpose(0, 1) if is_batched else x.unsqueeze(0) for x in _projected(query, key, value, weights, in_proj_bias))
    is_causal = _hint_replaces_mask(is_causal, key_padding_mask, need_weights)
    if is_causal:
        attn_mask = None
    mask = _mask(attn_mask, key_padding_mask, num_heads, query)
    heads = {"q_num_heads": num_heads, "kv_num_heads": num_heads}
    scores = None
    if need_weights:
        Y, scores = torch.ops.onnx_attn.attention.qk(Q, K, V, mask, qk_matmul_output_mode=3, **heads)
        if average_attn_weights:
            scores = scores.mean(1)
        if not is_batched:
            scores = scores.squeeze(0)
    else:
        Y = torch.ops.onnx_attn.attention.default(Q, K, V, mask, is_causal=is_causal, **heads)
    output = functional.linear(Y, out_proj_weight, out_proj_bias)
    return output.transpose(0, 1) if is_batched else output.squeeze(0), scores


def _hint_replaces_mask(is_causal: bool, key_padding_mask: Tensor | None, need_weights: bool) -> bool:
    """Torch does not look at attn_mask where is_causal is given and nothing else is masked.

    A hint that torch.nn.TransformerEncoder reads off the mask's values is not known in a graph: there the mask says the same.
    """
    return key_padding_mask is None and not need_weights and statically_known_true(is_causal)


def _projected(query: Tensor, key: Tensor, value: Tensor, weights: Any, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values; of self-attention by one product."""
    if isinstance(weights, Tensor) and query is key and key is value:
        queries, keys, values = functional.linear(query, weights, bias).chunk(3, -1)
        return queries, keys, values
    of_query, of_key, of_value = weights.chunk(3) if isinstance(weights, Tensor) else weights
    query_bias, key_bias, value_bias = (None, None, None) if bias is None else bias.chunk(3)
    return (
        functional.linear(query, of_query, query_bias),
        functional.linear(key, of_key, key_bias),
        functional.linear(value, of_value, value_bias),
    )


def _mask(attn_mask: Tensor | None, key_padding_mask: Tensor | None, num_heads: int, query: Tensor) -> Tensor | None:
    """One mask in ONNX's sense, where True keeps; torch's bool masks say what to drop."""
    if attn_mask is not None and attn_mask.dim() == 3:
        attn_mask = attn_mask.unflatten(0, (-1, num_heads))  # [B * heads, L, S]
    if key_padding_mask is not None:
        key_padding_mask = (key_padding_mask if key_padding_mask.dim() == 2 else key_padding_mask[None])[:, None, None]
        if is_exporting():  # ONNX Runtime's native Attention kernels refuse a row axis of size 1
            key_padding_mask = mask_with_rows(key_padding_mask, query.shape[0])
    if attn_mask is None or key_padding_mask is None:
        mask = key_padding_mask if attn_mask is None else attn_mask
        return mask if mask is None or mask.dtype != torch.bool else ~mask
    if attn_mask.dtype == key_padding_mask.dtype == torch.bool:
        return ~(attn_mask | key_padding_mask)
    return _bias(attn_mask, query.dtype) + _bias(key_padding_mask, query.dtype)


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
