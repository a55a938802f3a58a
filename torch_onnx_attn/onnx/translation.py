"""The translation table: what the exporter writes for each torch.ops.onnx_attn op.

A translation is called with onnx_ir values in place of tensors and plain Python numbers for attributes; arguments that a call
leaves out are left out here as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from torch_onnx_attn.onnx import nodes
from torch_onnx_attn.onnx.nodes import Translated, Value
from torch_onnx_attn.onnx.requirements import CONVERTED_OPSET, LOWEST_OPSET, ExportError, need, refusal, require_packages

__all__ = ["translation_table"]

_INT32, _INT64, _BOOL, _DOUBLE = 6, 7, 9, 11  # TensorProto's numbers
_MASKED_FROM = -1000.0  # valid_kv_length: a number up to this one masks a key


def translation_table(opset: int) -> dict[Callable[..., Any], Callable[..., Any]]:
    """For `torch.onnx.export(..., dynamo=True, opset_version=opset, custom_translation_table=translation_table(opset))`.

    `opset` must be the one given to `torch.onnx.export` (23, 24 or 25; from 18 if the model has `mha` only). Opsets above 25 are
    beyond that function; `torch_onnx_attn.onnx.export` reaches 28. A call that the opset cannot say raises `ExportError`, which
    the exporter wraps into its own ConversionError.

    At opset_version 24 and 25 the exporter's optimizer writes out outputs that nobody reads (of `attention.qk`), and removes the
    present outputs of a call with a past if nobody reads them, without which ONNX Runtime does not run the node.
    `torch_onnx_attn.onnx.tidy(program)` puts both right; `export` has it built in.
    """
    require_packages()
    if not isinstance(opset, int):
        raise ExportError(f"opset={opset!r}: must be an integer")
    if not LOWEST_OPSET <= opset <= CONVERTED_OPSET:
        raise ExportError(
            f"opset={opset}: torch.onnx.export reaches opsets {LOWEST_OPSET} to {CONVERTED_OPSET}. torch_onnx_attn.onnx.export reaches 28"
        )
    ops = torch.ops.onnx_attn
    return {
        ops.attention.default: _attention(opset, "Y"),
        ops.attention.kv: _attention(opset, "Y", "present_key", "present_value"),
        ops.attention.qk: _attention(opset, "Y", "qk_matmul_output"),
        ops.attention.kv_qk: _attention(opset, "Y", "present_key", "present_value", "qk_matmul_output"),
        ops.attention.lse: _lse,
        ops.mha.default: _mha("output"),
        ops.mha.kv: _mha("output", "present_key", "present_value"),
        ops.mha.qk: _mha("output", "qk"),
        ops.mha.kv_qk: _mha("output", "present_key", "present_value", "qk"),
        ops.mha.shared_functional: _mha("output", "present_key", "present_value"),  # what mha.shared decomposes into
        ops.tensor_scatter.default: _tensor_scatter(opset),
        ops.valid_kv_length.default: _valid_kv_length,
    }


# ---------------------------------------------------------------------------------------------------------------------
# ai.onnx::Attention
# ---------------------------------------------------------------------------------------------------------------------


def _attention(opset: int, *outputs: str) -> Callable[..., Translated]:
    def attention(
        Q: Value,
        K: Value,
        V: Value,
        attn_mask: Value = None,
        *,
        past_key: Value = None,
        past_value: Value = None,
        nonpad_kv_seqlen: Value = None,
        **attributes: Any,
    ) -> Translated:
        _check_opset(opset, "attention", {"nonpad_kv_seqlen": nonpad_kv_seqlen, **attributes})
        inputs = [Q, K, V, attn_mask, past_key, past_value]
        if nonpad_kv_seqlen is not None:
            inputs.append(_cast(nonpad_kv_seqlen, _INT64))
        return nodes.attention(opset, inputs, _attention_attributes(len(Q.shape), attributes), outputs)

    return attention


def _attention_attributes(rank: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """What differs from the defaults. Head counts belong to 3-D inputs: opset 25 forbids them on others."""
    written: dict[str, Any] = {}
    if given.get("is_causal", False):
        written["is_causal"] = 1
    if rank == 3:
        written.update(q_num_heads=given["q_num_heads"], kv_num_heads=given["kv_num_heads"])
    if given.get("scale") is not None:  # 0.0 is a scale, unlike in mha
        written["scale"] = nodes.float_attribute("scale", given["scale"])
    if given.get("softcap", 0.0) != 0.0:
        written["softcap"] = nodes.float_attribute("softcap", given["softcap"])
    if given.get("softmax_precision") is not None:
        written["softmax_precision"] = given["softmax_precision"]
    if given.get("qk_matmul_output_mode", 0) != 0:
        written["qk_matmul_output_mode"] = given["qk_matmul_output_mode"]
    for window in ("left_window_size", "right_window_size"):
        if given.get(window, -1) != -1:
            written[window] = given[window]
    return written


def _lse(*args: Any, **kwargs: Any) -> Translated:
    raise ExportError(refusal("attention", "lse", float64=False))


# ---------------------------------------------------------------------------------------------------------------------
# com.microsoft::MultiHeadAttention
# ---------------------------------------------------------------------------------------------------------------------


def _mha(*outputs: str) -> Callable[..., Translated]:
    def mha(
        query: Value,
        key: Value = None,
        value: Value = None,
        bias: Value = None,
        key_padding_mask: Value = None,
        attention_bias: Value = None,
        *,
        past_key: Value = None,
        past_value: Value = None,
        past_sequence_length: Value = None,
        cache_indirection: Value = None,
        num_heads: int,
        scale: float = 0.0,
        mask_filter_value: float = -10000.0,
        unidirectional: bool = False,
        output_qk: bool = False,
    ) -> Translated:
        reason = refusal("mha", "", float64=query.dtype == _DOUBLE)
        if reason is not None:
            raise ExportError(reason)
        written: dict[str, Any] = {"num_heads": num_heads}
        if scale != 0.0:
            written["scale"] = nodes.float_attribute("scale", scale)
        if mask_filter_value != -10000.0:
            written["mask_filter_value"] = nodes.float_attribute("mask_filter_value", mask_filter_value)
        if unidirectional:
            written["unidirectional"] = 1
        inputs = [query, key, value, bias, _int32_mask(key_padding_mask), attention_bias, past_key, past_value]
        inputs += [_cast(past_sequence_length, _INT32), _cast(cache_indirection, _INT32)]
        return nodes.multi_head_attention(inputs, written, outputs)

    return mha


def _int32_mask(mask: Value) -> Value:
    """The operator takes int32 masks only. "Keep" is > 0, which an int64 number beyond int32 must still say after the cast."""
    if mask is not None and mask.dtype == _INT64:
        is_lengths = len(mask.shape) == 1  # more than int32 holds is more than there are keys
        mask = nodes.helper("Clip", mask, 0, 2**31 - 1) if is_lengths else nodes.helper("Greater", mask, 0)
        return nodes.helper("Cast", mask, to=_INT32)
    return _cast(mask, _INT32)


def _cast(tensor: Value, dtype: int) -> Value:
    return tensor if tensor is None or tensor.dtype == dtype else nodes.helper("Cast", tensor, to=dtype)


# ---------------------------------------------------------------------------------------------------------------------
# caches
# ---------------------------------------------------------------------------------------------------------------------


def _tensor_scatter(opset: int) -> Callable[..., Translated]:
    def tensor_scatter(
        past_cache: Value, update: Value, write_indices: Value = None, *, axis: int = -2, circular: bool = False
    ) -> Translated:
        _check_opset(opset, "tensor_scatter", {})
        written: dict[str, Any] = {}
        rank = len(past_cache.shape)
        if axis % rank != rank - 2:
            written["axis"] = axis
        if circular:
            written["mode"] = "circular"
        return nodes.tensor_scatter(opset, [past_cache, update, _cast(write_indices, _INT64)], written)

    return tensor_scatter


def _valid_kv_length(attn_mask: Value) -> Value:
    """One past the last key that the mask's last row allows to any head, per batch entry: int64 [batch], or [1] below rank 4."""
    row, rank = attn_mask, len(attn_mask.shape)
    if rank >= 2:
        row = nodes.helper("Gather", row, -1, axis=rank - 2)  # the last query row: [batch, heads, kv_len] at rank 4
        row.type = attn_mask.type  # so that the number it is compared with becomes a constant of that type
    if attn_mask.dtype != _BOOL:
        row = nodes.helper("Greater", row, _MASKED_FROM)
    row = nodes.helper("Cast", row, to=_INT64)
    if rank == 4:
        row = nodes.helper("ReduceMax", row, [1], keepdims=0)
    elif rank == 3:
        row = nodes.helper("ReduceMax", row, [0], keepdims=1)
    else:
        row = nodes.helper("Unsqueeze", row, [0])
    last = nodes.helper("ArgMax", row, axis=1, keepdims=0, select_last_index=1)
    any_allowed = nodes.helper("ReduceMax", row, [1], keepdims=0)
    return nodes.helper("Mul", nodes.helper("Add", last, 1), any_allowed)  # no key allowed: 0


def _check_opset(opset: int, op: str, arguments: Mapping[str, Any]) -> None:
    needed = need(op, arguments)
    if needed is not None and needed.opset > opset:
        raise ExportError(f"opset={opset}: {needed.argument} needs opset {needed.opset}")
