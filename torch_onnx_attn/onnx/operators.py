"""The ONNX operators that become our ops and back: which op, and the names of inputs and outputs in ONNX's order."""

from __future__ import annotations

KINDS = {  # (domain, operator) -> op
    ("", "Attention"): "attention",
    ("com.microsoft", "MultiHeadAttention"): "mha",
    ("", "TensorScatter"): "tensor_scatter",
}
INPUTS = {
    "attention": ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"),
    "mha": (
        *("query", "key", "value", "bias", "key_padding_mask", "attention_bias"),
        *("past_key", "past_value", "past_sequence_length", "cache_indirection"),
    ),
    "tensor_scatter": ("past_cache", "update", "write_indices"),
}
OUTPUTS = {
    "attention": ("Y", "present_key", "present_value", "qk_matmul_output"),
    "mha": ("output", "present_key", "present_value", "qk"),
    "tensor_scatter": ("present_cache",),
}
