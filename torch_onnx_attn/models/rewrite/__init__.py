"""Turns attention that is written out in an ONNX model, and com.microsoft::GroupQueryAttention, into Attention nodes.

`rewrite` changes a model in memory by what the graph proves; `rewrite_file` also compares both models on numbers before it writes.
"""

from torch_onnx_attn.models.rewrite.file import rewrite_file
from torch_onnx_attn.models.rewrite.report import Report
from torch_onnx_attn.models.rewrite.rewriting import rewrite

__all__ = ["Report", "rewrite", "rewrite_file"]
