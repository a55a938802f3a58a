"""ONNX Runtime on the CPU: a session that computes what a model says, and arrays of every type in and out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .arrays import to_array
from .packages import numpy, onnx

__all__ = ["onnxruntime_session", "run_session"]


def onnxruntime_session(model: Any, folder: str | os.PathLike[str] | None = None) -> Any:
    """A session on the CPU that computes what the model says: no optimisations. External data is looked for in `folder`."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", os.fspath(folder) or ".")
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run_session(session: Any, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays by the names of the outputs. Types that numpy knows from ml_dtypes only go in and come out as well."""
    import onnxruntime

    values = {}
    for name, array in feeds.items():
        dtype = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        if array.dtype.kind == "V":
            values[name] = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(numpy.ascontiguousarray(array), dtype)
        else:
            values[name] = onnxruntime.OrtValue.ortvalue_from_numpy(numpy.ascontiguousarray(array).reshape(array.shape))
    made = session.run_with_ort_values(None, values)
    return {output.name: _array(value) for output, value in zip(session.get_outputs(), made, strict=True)}


def _array(value: Any) -> Any:
    dtype = onnx.helper.tensor_dtype_to_np_dtype(value.element_type())
    if dtype.kind != "V":
        return value.numpy()
    import torch.utils.dlpack

    bits = torch.utils.dlpack.from_dlpack(value._ortvalue.to_dlpack() if hasattr(value, "_ortvalue") else value)
    return to_array(bits.clone())
