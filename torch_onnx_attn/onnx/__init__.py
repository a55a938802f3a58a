"""Export to ONNX: each attention call becomes one node.

`export` is the way for most people::

    import torch_onnx_attn.onnx

    program = torch_onnx_attn.onnx.export(model, (q, k, v), "model.onnx", dynamic_shapes=({0: "batch", 2: "q_len"}, ...))

It looks at the calls in the model, picks the lowest opset that can say them, and refuses with a reason what ONNX cannot say.
`translation_table` is the part of it that `torch.onnx.export` takes, for those who call that themselves::

    torch.onnx.export(model, args, dynamo=True, opset_version=24, custom_translation_table=torch_onnx_attn.onnx.translation_table(24))

`export(..., check=True)` compares the file with the model on ONNX Runtime, `print(report(program))` says what is in it and why that
opset, `axes` and `differing_axes` write `dynamic_shapes`, and `export_static_cache` and `export_past_present` export decoders with the
names that ONNX Runtime GenAI expects.

What becomes what:

=====================================  ==============================================================  ==================
call                                   nodes                                                           lowest opset
=====================================  ==============================================================  ==================
attention                              Attention                                                       23
... with nonpad_kv_seqlen              Attention                                                       24
... with a window                      Attention                                                       25
mha                                    com.microsoft::MultiHeadAttention                               the exporter's own
... with an int64 or bool mask         the same, and a Cast to int32 (int64: after Greater or Clip)    the exporter's own
tensor_scatter, tensor_scatter_        TensorScatter                                                   24
attention_cached                       2 TensorScatter, 1 Add, 1 Attention (4-D inputs)                24
valid_kv_length                        6 to 8 small nodes                                              the exporter's own
attention with lse                     none: refused, ONNX has no such output                          -
=====================================  ==============================================================  ==================

Good to know:

* A graph returns what `forward` returns and nothing else: the exporter drops the writes of in-place ops. Return the caches.
* Attributes are float32 in ONNX, so `scale` and `softcap` of a float64 call are rounded to float32 in the file.
* The file may say more than a runtime implements. ONNX Runtime 1.32 on the CPU has native kernels for Attention of opsets 23 and
  24 in float32 and float16, runs opset 25 as an expanded function, and has no bfloat16. The native kernels take masks of shapes
  (q_len, kv_len), (1 or heads, q_len, kv_len) and (1 or batch, 1 or heads, q_len, kv_len) only: expand others, or use opset 25.
* ONNX Runtime's MultiHeadAttention has no packed layouts and no bfloat16 on the CPU, and aligns `unidirectional` top-left there when
  q_len and kv_len differ. Version 1.30 shares buffers only with a cache_indirection, and refuses the windows of Attention.
* ONNX Runtime multiplies the keys past `nonpad_kv_seqlen` by zero instead of leaving them out: start its caches at zero, not at NaN.
* onnx, onnxscript and onnx-ir are imported when a function of this package is called, not before.
"""

from torch_onnx_attn.onnx.caches import PastPresent, export_past_present, export_static_cache
from torch_onnx_attn.onnx.checking import CheckReport, Finding, ONNXCheckError, check
from torch_onnx_attn.onnx.dynamic import axes, differing_axes
from torch_onnx_attn.onnx.exporter import export, tidy
from torch_onnx_attn.onnx.reporting import ExportReport, NodeReport, report
from torch_onnx_attn.onnx.requirements import ExportError
from torch_onnx_attn.onnx.translation import translation_table

__all__ = [
    "CheckReport",
    "ExportError",
    "ExportReport",
    "Finding",
    "NodeReport",
    "ONNXCheckError",
    "PastPresent",
    "axes",
    "check",
    "differing_axes",
    "export",
    "export_past_present",
    "export_static_cache",
    "report",
    "tidy",
    "translation_table",
]
