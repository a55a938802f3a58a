"""The attention function that transformers calls in each layer, and how its arguments become those of the op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .errors import UnsupportedError
from .masks import KeyMask, read_mask
from .sinks import attend_with_sinks
from .tracing import is_collecting_weights, is_exporting

ops = torch.ops.onnx_attn.attention

_FROM_MODULE = object()  # sliding_window was not passed at all: Qwen2-MoE keeps it in the module only


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: Any = _FROM_MODULE,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool | None = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one layer, as transformers' AttentionInterface wants it.

    B = batch, Hq and Hkv = query and key/value heads, L = query rows, S = keys, D and Dv = head sizes.

    Args:
        module: the layer's attention module; asked for what the call does not say.
        query: ``[B, Hq, L, D]``.
        key, value: ``[B, Hkv, S, D]`` and ``[B, Hkv, S, Dv]``, what the cache returned. Heads are not repeated.
        attention_mask: see `torch_onnx_attn.integrations.transformers.masks`.
        dropout: must be 0.
        scaling: of the scores; None means ``1 / sqrt(D)``.
        is_causal: None asks the module, whose default is True. Heeded for L > 1 and masks that are not complete.
        sliding_window: how many keys a row sees, its own included, to each side that is open. Heeded like is_causal.
        softcap: of the scores, before the mask.
        s_aux: ``[Hq]``, attention sinks: scores that take part in the softmax and have no value.
        position_bias: ``[B or 1, Hq or 1, L or 1, S]``, added to the scores (T5).
        output_attentions: also return the weights.
        others: what concerns other implementations.

    Returns:
        ``[B, L, Hq, Dv]``, contiguous, and the weights ``[B, Hq, L, S]`` or None.

    Raises:
        UnsupportedError: dropout, block-sparse indices, packed sequences without a mask, or a mask of another form.
    """
    _refuse(dropout, scaling, attention_mask, others)
    q_len = query.shape[2]
    mask = read_mask(attention_mask)
    if mask.is_complete:
        _check_keys(mask.attn_mask, key.shape[2])
    # At L = 1 every key that the cache holds is visible, while the op would align causality to key 0.
    flags_hold = q_len > 1 and not mask.is_complete
    causal = bool(is_causal if is_causal is not None else getattr(module, "is_causal", True))
    window = getattr(module, "sliding_window", None) if sliding_window is _FROM_MODULE else sliding_window
    left = window - 1 if flags_hold and window else -1
    options: dict[str, Any] = {
        "is_causal": flags_hold and causal,
        "scale": scaling,
        "softcap": float(softcap or 0.0),
        "left_window_size": left,
        "right_window_size": -1 if causal else left,
    }
    attn_mask = _with_bias(mask, position_bias)
    if attn_mask is not None and attn_mask.shape[-2] == 1 and q_len > 1 and left < 0 and is_exporting():
        # ONNX Runtime's native kernels of opsets 23 and 24 refuse a mask that is broadcast over the rows. Windows need opset 25.
        attn_mask = attn_mask.expand(-1, -1, q_len, -1)
    inputs = (query, key, value, attn_mask)
    weights = None
    with_weights = bool(output_attentions) or is_collecting_weights()
    if s_aux is not None:
        output, weights = attend_with_sinks(*inputs, mask.lengths, s_aux, options, with_weights=with_weights)
    elif with_weights:
        output, weights = ops.qk(*inputs, nonpad_kv_seqlen=mask.lengths, qk_matmul_output_mode=3, **options)
    else:
        output = ops.default(*inputs, nonpad_kv_seqlen=mask.lengths, **options)
    return output.transpose(1, 2).contiguous(), weights  # no copy where query is a view of [B, L, Hq, D]: the op keeps that order


def _refuse(dropout: float, scaling: Any, attention_mask: Tensor | None, others: dict[str, Any]) -> None:
    if dropout:
        raise UnsupportedError(f"dropout: is {dropout}; onnx_attn is forward only. Call model.eval(), or train with 'sdpa'")
    if isinstance(scaling, Tensor):
        raise UnsupportedError("scaling: is a tensor; onnx_attn takes a number, since it is an attribute in ONNX")
    for name in ("block_indices", "indices"):
        if others.get(name) is not None:
            raise UnsupportedError(f"{name}: block-sparse attention by indices is not supported by onnx_attn. Use 'eager' for this model")
    if others.get("cu_seq_lens_q") is not None and (attention_mask is None or attention_mask.dim() != 4):
        raise UnsupportedError("cu_seq_lens_q: packed sequences need a mask here. Give position_ids that restart at 0 instead")


def _check_keys(attn_mask: Tensor | None, keys: int) -> None:
    """The op disallows the keys that a mask does not reach; here a mask of another length is a mistake. Symbolic sizes are left alone."""
    columns = keys if attn_mask is None else attn_mask.shape[-1]
    if type(columns) is int and type(keys) is int and columns != keys:
        raise UnsupportedError(f"attention_mask: its last axis is {columns}, and there are {keys} keys")


def _with_bias(mask: KeyMask, position_bias: Tensor | None) -> Tensor | None:
    """One tensor for both, since the op has one input for them. Causality and lengths stay what they are."""
    kept = mask.attn_mask
    if position_bias is None or kept is None:
        return kept if position_bias is None else position_bias
    if kept.dtype == torch.bool:
        return torch.where(kept, position_bias, -torch.inf)
    return position_bias + kept
