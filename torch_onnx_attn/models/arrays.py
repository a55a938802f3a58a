"""Between numpy, whose half of the types are strangers to it, and torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..bad_input import BadInput
from .packages import numpy, onnx

__all__ = ["to_array", "to_tensor"]

# Types that numpy has from ml_dtypes only, by name, and integers of their size that both sides have.
_BY_BITS: dict[str, tuple[torch.dtype, Any]] = {
    "bfloat16": (torch.bfloat16, numpy.uint16),
    "float8_e4m3fn": (torch.float8_e4m3fn, numpy.uint8),
    "float8_e5m2": (torch.float8_e5m2, numpy.uint8),
}


def to_tensor(name: str, array: Any) -> Tensor:
    """A copy of an array as a tensor of the same type. Raises BadInput for a type that torch does not have."""
    array = numpy.ascontiguousarray(array).reshape(numpy.shape(array))  # ascontiguousarray makes a scalar one axis
    if array.dtype.name in _BY_BITS:
        dtype, bits = _BY_BITS[array.dtype.name]
        return torch.from_numpy(array.view(bits).copy()).view(dtype)
    try:
        return torch.from_numpy(array.copy())
    except TypeError as error:
        raise BadInput(f"{name}: has type {array.dtype}, which torch does not have") from error


def to_array(tensor: Tensor) -> Any:
    """The tensor as a numpy array of the same type."""
    tensor = tensor.detach().cpu().contiguous()
    for name, (dtype, bits) in _BY_BITS.items():
        if tensor.dtype == dtype:
            code = {"bfloat16": onnx.TensorProto.BFLOAT16, "float8_e4m3fn": onnx.TensorProto.FLOAT8E4M3FN}.get(
                name, onnx.TensorProto.FLOAT8E5M2
            )
            integer = torch.uint16 if bits is numpy.uint16 else torch.uint8
            return tensor.view(integer).numpy().view(onnx.helper.tensor_dtype_to_np_dtype(code))
    return tensor.numpy()
