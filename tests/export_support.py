"""What the export tests share: a call as a model, its ONNX file taken apart, and two places to run it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

onnx = pytest.importorskip("onnx", reason="needs the packages onnx, onnxscript and onnxruntime")
pytest.importorskip("onnxscript", reason="needs the packages onnx, onnxscript and onnxruntime")
ort = pytest.importorskip("onnxruntime", reason="needs the packages onnx, onnxscript and onnxruntime")

import torch_onnx_attn.onnx  # noqa: E402

logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)  # "torchvision is not installed"

with contextlib.suppress(ImportError, AttributeError):
    # The exporter parses its library of translations anew for every export: half the time of a small model.
    from torch.onnx._internal import _lazy_import

    _lazy_import.onnxscript_apis.get_torchlib_ops = functools.cache(_lazy_import.onnxscript_apis.get_torchlib_ops)

# ONNX Runtime 1.30 knows no window attributes, its Attention-25 takes fewer masks, opsets 27 and 28 are beyond it, and its
# MultiHeadAttention shares buffers only with a cache_indirection.
ORT_IS_CURRENT = tuple(int(part) for part in ort.__version__.split(".")[:2]) >= (1, 32)
needs_current_ort = pytest.mark.skipif(not ORT_IS_CURRENT, reason="needs ONNX Runtime 1.32")
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}


class Call(nn.Module):
    """A function of named tensors as a model. Tensors go in positionally, in the order of `names`."""

    def __init__(self, names: Sequence[str], function: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]) -> None:
        super().__init__()
        self.names, self.function = tuple(names), function

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.function(dict(zip(self.names, tensors, strict=True))).values())


@dataclasses.dataclass
class Exported:
    """An ONNX model that came out of a call, and what the call gives in eager mode."""

    proto: Any
    inputs: dict[str, Tensor]
    eager: dict[str, Tensor]
    function: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]

    @property
    def opset(self) -> int:
        return next(entry.version for entry in self.proto.opset_import if entry.domain == "")

    @property
    def nodes(self) -> list[Any]:
        return list(self.proto.graph.node)

    @property
    def types(self) -> list[str]:
        return [node.op_type for node in self.nodes]

    def node(self, op_type: str) -> Any:
        """The only node of a type."""
        found = [node for node in self.nodes if node.op_type == op_type]
        assert len(found) == 1, self.types
        return found[0]

    def agrees(self, where: str, inputs: dict[str, Tensor] | None = None, tolerance: float | None = None) -> None:
        """The model gives what eager gives, for the inputs of the export or others. `where` is "ort" or "reference"."""
        want = self.eager if inputs is None else eager(self.function, inputs)
        got = run(self.proto, inputs or self.inputs, where)
        assert list(want) == [output.name for output in self.proto.graph.output]
        for (name, expected), actual in zip(want.items(), got, strict=True):
            assert actual.dtype == expected.dtype, name
            allowed = TOLERANCES.get(expected.dtype, 0.0)
            if where == "ort" and expected.dtype == torch.float64:
                allowed = 1e-6  # ONNX Runtime expands float64 nodes with a float32 scale
            allowed = allowed if tolerance is None else tolerance
            torch.testing.assert_close(actual, expected, rtol=allowed, atol=allowed, msg=lambda text, name=name: f"{where}, {name}: {text}")


def eager(function: Callable[[dict[str, Tensor]], Mapping[str, Tensor]], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """On copies: the call may write its inputs."""
    return dict(function({name: tensor.clone() for name, tensor in inputs.items()}))


def export(
    function: Callable[[dict[str, Tensor]], Mapping[str, Tensor]],
    inputs: dict[str, Tensor],
    *,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    full_check: bool = True,
    **options: Any,
) -> Exported:
    """Export a call; inputs and outputs of the graph have the names of `inputs` and of what the function returns.

    `dynamic` gives the dynamic axes of the inputs that have some. Every model goes through onnx.checker.
    """
    expected = eager(function, inputs)
    shapes = None if dynamic is None else {"tensors": tuple(dict(dynamic.get(name, {})) or None for name in inputs)}
    program = torch_onnx_attn.onnx.export(
        Call(list(inputs), function).eval(),
        tuple(tensor.clone() for tensor in inputs.values()),
        dynamic_shapes=shapes,
        input_names=list(inputs),
        output_names=list(expected),
        **options,
    )
    onnx.checker.check_model(program.model_proto, full_check=full_check)
    return Exported(program.model_proto, inputs, expected, function)


def run(proto: Any, inputs: dict[str, Tensor], where: str) -> list[Tensor]:
    """The outputs, by ONNX Runtime on the CPU or by onnx.reference."""
    used = {value.name for value in proto.graph.input}
    feeds = {name: to_numpy(tensor) for name, tensor in inputs.items() if name in used}
    if where == "ort":
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return [torch.from_numpy(np.asarray(array)) for array in session.run(None, feeds)]
    from onnx.reference import ReferenceEvaluator

    return [from_numpy(np.asarray(array)) for array in ReferenceEvaluator(proto).run(None, feeds)]


def to_numpy(tensor: Tensor) -> Any:
    tensor = tensor.detach().contiguous()
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    import ml_dtypes

    return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)


def from_numpy(array: Any) -> Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def attributes(node: Any) -> dict[str, Any]:
    return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}


def in_order(present: Sequence[str] | Mapping[str, Any], order: Sequence[str]) -> list[str]:
    """The names of a node's inputs or outputs as ONNX writes them: "" for what is absent, nothing at the end."""
    names = [name if name in present else "" for name in order]
    while not names[-1]:
        names.pop()
    return names
