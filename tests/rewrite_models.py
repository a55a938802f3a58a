"""Small graphs for the tests of the rewrite, written as ONNX text, and what the tests ask of a rewritten model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="needs the packages onnx, onnxscript and onnxruntime")
pytest.importorskip("onnxscript", reason="needs the packages onnx, onnxscript and onnxruntime")
ort = pytest.importorskip("onnxruntime", reason="needs the packages onnx, onnxscript and onnxruntime")

import onnx_ir  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from torch_onnx_attn.models.rewrite import Report, rewrite  # noqa: E402

LOWEST = float(np.finfo(np.float32).min)
QKV = "float[b,4,l,8] q, float[b,4,s,8] k, float[b,4,s,8] v"
GROUPED = "float[b,4,l,8] q, float[b,2,s,8] k, float[b,2,s,8] v"
TRANSPOSED = "kt = Transpose<perm = [0,1,3,2]>(k)\n"
PRODUCT = TRANSPOSED + "s = MatMul(q, kt)\n"
END = "w = Softmax<axis = -1>(m)\ny = MatMul(w, v)"
SIZES = ({"b": 2, "l": 5, "s": 7}, {"b": 3, "l": 4, "s": 4}, {"b": 1, "l": 1, "s": 6})


def graph(
    body: str,
    inputs: str = QKV,
    outputs: str = "float[b,h,l,d] y",
    opset: int = 18,
    constants: Mapping[str, Any] | None = None,
) -> Any:
    """A model with these nodes. Constants are float32 where they are Python floats, int64 where they are integers."""
    text = f'<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]>\ng ({inputs}) => ({outputs}) {{\n{body}\n}}'
    model = onnx.parser.parse_model(text)
    for name, value in (constants or {}).items():
        array = np.asarray(value)
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


@dataclasses.dataclass
class Rewritten:
    """A model before and after."""

    before: Any
    after: Any
    report: Report

    @property
    def types(self) -> list[str]:
        return [node.op_type for node in self.after.graph.node]

    @property
    def attention(self) -> Any:
        """The only Attention node."""
        found = [node for node in self.after.graph.node if node.op_type == "Attention"]
        assert len(found) == 1, (self.types, self.report.left)
        return found[0]

    @property
    def attributes(self) -> dict[str, Any]:
        values = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in self.attention.attribute}
        return {name: pytest.approx(value, rel=1e-6) if isinstance(value, float) else value for name, value in values.items()}

    def agrees(self, feeds: Mapping[str, Any], where: str = "reference", tolerance: float = 2e-6) -> None:
        """Both models give the same for these arrays."""
        runner = by_reference if where == "reference" else by_onnxruntime
        for want, got in zip(runner(self.before, feeds), runner(self.after, feeds), strict=True):
            np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)

    def agrees_at_all_sizes(self) -> None:
        """With made-up arrays, in ONNX Runtime and onnx.reference; bool inputs have rows without a True only in the latter."""
        for seed, sizes in enumerate(SIZES):
            self.agrees(arrays(self.before, sizes, seed, rows_may_be_empty=True), "reference")
            self.agrees(arrays(self.before, sizes, seed), "onnxruntime")


def rewritten(model: Any, **options: Any) -> Rewritten:
    """Rewrite a copy, which must be a valid model."""
    onnx.checker.check_model(model, full_check=True)
    copy = onnx_ir.from_proto(model)
    report = rewrite(copy, **options)
    after = onnx_ir.to_proto(copy)
    onnx.checker.check_model(after, full_check=True)
    assert len(report.replaced) == sum(node.op_type == "Attention" for node in after.graph.node)
    return Rewritten(model, after, report)


def arrays(model: Any, sizes: Mapping[str, int], seed: int = 0, rows_may_be_empty: bool = False) -> dict[str, Any]:
    """Normal numbers; for bools True in three of four places, in the first column everywhere unless rows may be empty."""
    generator = np.random.default_rng(seed)
    made = {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        shape = [dim.dim_value if dim.HasField("dim_value") else sizes[dim.dim_param] for dim in kind.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        if dtype.kind == "b":
            array: Any = generator.random(shape) < 0.75
            array[..., 0] |= not rows_may_be_empty
            if rows_may_be_empty:
                array[..., :1, :] = False
        else:
            array = generator.standard_normal(shape)
        made[value.name] = np.asarray(array).astype(dtype)
    return made


def by_reference(model: Any, feeds: Mapping[str, Any]) -> list[Any]:
    with np.errstate(all="ignore"):
        return [np.asarray(result) for result in ReferenceEvaluator(model).run(None, dict(feeds))]


def by_onnxruntime(model: Any, feeds: Mapping[str, Any]) -> list[Any]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(feeds)))
