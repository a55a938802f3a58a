"""ONNX models in a few lines: one attention node on given arrays, and models around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", minversion="1.23", reason="needs the packages onnx, onnxscript and onnx-ir")
pytest.importorskip("onnx_ir", reason="needs the packages onnx, onnxscript and onnx-ir")
pytest.importorskip("onnxscript", reason="needs the packages onnx, onnxscript and onnx-ir")

from torch_onnx_attn.models.node import AttentionNode, find_nodes  # noqa: E402
from torch_onnx_attn.onnx.operators import INPUTS, OUTPUTS  # noqa: E402

OPERATORS = {"attention": ("", "Attention"), "mha": ("com.microsoft", "MultiHeadAttention"), "tensor_scatter": ("", "TensorScatter")}
Arrays = dict[str, Any]


class Source:
    """Random arrays by a fixed seed."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = np.random.default_rng(seed)

    def normal(self, *shape: int, dtype: Any = np.float32) -> Any:
        return self.generator.standard_normal(shape).astype(dtype)

    def qkv(self, q_len: int = 3, kv_len: int = 5, *, dtype: Any = np.float32, heads: int = 4, kv_heads: int = 2, size: int = 8) -> Arrays:
        shapes = {"Q": (2, heads, q_len, size), "K": (2, kv_heads, kv_len, size), "V": (2, kv_heads, kv_len, size)}
        return {name: self.normal(*shape, dtype=dtype) for name, shape in shapes.items()}

    def past(self, past_len: int = 4, *, heads: int = 2, size: int = 8) -> Arrays:
        return {name: self.normal(2, heads, past_len, size) for name in ("past_key", "past_value")}

    def mha(self, q_len: int = 3, kv_len: int = 5, *, dtype: Any = np.float32) -> Arrays:
        return {"query": self.normal(2, q_len, 32, dtype=dtype)} | {
            name: self.normal(2, kv_len, 32, dtype=dtype) for name in ("key", "value")
        }

    def keep(self, *shape: int) -> Any:
        return self.generator.random(shape) < 0.7


def in_order(given: Mapping[str, Any] | Sequence[str], order: Sequence[str]) -> list[str]:
    names = [name if name in given else "" for name in order]
    while not names[-1]:
        names.pop()
    return names


def value(name: str, array: Any, shape: Sequence[Any] | None = None) -> Any:
    element = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    return onnx.helper.make_tensor_value_info(name, element, array.shape if shape is None else shape)


def node_proto(op: str, inputs: Mapping[str, Any] | Sequence[str], outputs: Sequence[str], name: str = "layer", **attributes: Any) -> Any:
    domain, op_type = OPERATORS[op]
    return onnx.helper.make_node(
        op_type, in_order(inputs, INPUTS[op]), in_order(outputs, OUTPUTS[op]), name=name, domain=domain, **attributes
    )


def model_of(nodes: Sequence[Any], inputs: Mapping[str, Any], outputs: Sequence[Any], opset: int = 24, **more: Any) -> Any:
    """A model whose inputs are named and shaped like the arrays. `outputs` are names or value infos."""
    functions = more.pop("functions", [])
    imports = [onnx.helper.make_opsetid("", opset), onnx.helper.make_opsetid("com.microsoft", 1)]
    imports += [onnx.helper.make_opsetid(domain, 1) for domain in {function.domain for function in functions}]
    made = [onnx.helper.make_empty_tensor_value_info(entry) if isinstance(entry, str) else entry for entry in outputs]
    infos = [value(name, array) for name, array in inputs.items()]
    graph = onnx.helper.make_graph(list(nodes), "graph", infos, made, **more)
    return onnx.helper.make_model(graph, opset_imports=imports, functions=functions, ir_version=10)


def model_of_node(op: str, arrays: Arrays, outputs: Sequence[str] | None = None, opset: int = 24, **attributes: Any) -> Any:
    """A model of one node; the values have ONNX's names of the inputs and outputs."""
    outputs = OUTPUTS[op][:1] if outputs is None else outputs
    first = next(iter(arrays.values()))
    element = onnx.helper.np_dtype_to_tensor_dtype(first.dtype)
    infos = [onnx.helper.make_tensor_value_info(name, element, None) for name in outputs]
    return model_of([node_proto(op, arrays, outputs, **attributes)], arrays, infos, opset)


def node_of(op: str, arrays: Arrays, outputs: Sequence[str] | None = None, opset: int = 24, **attributes: Any) -> AttentionNode:
    return find_nodes(model_of_node(op, arrays, outputs, opset, **attributes))[0]


def save(model: Any, folder: Path, name: str = "model.onnx") -> Path:
    path = folder / name
    onnx.save(model, path)
    return path
