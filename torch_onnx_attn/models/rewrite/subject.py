"""The graph that is being read, and the questions that every pattern asks of it."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from torch_onnx_attn.models.rewrite.constants import Constants
from torch_onnx_attn.models.rewrite.no_match import NoMatch
from torch_onnx_attn.models.rewrite.sizes import Shape
from torch_onnx_attn.models.rewrite.symbolic import Shapes

__all__ = ["Subject", "attribute", "is_operator", "producer", "unscaled"]


class Subject:
    """A graph with its sizes and constants; values that a rewrite adds are asked for by what they hold, so that layers share them."""

    def __init__(self, model: ir.Model) -> None:
        self.graph = model.graph
        self.shapes = Shapes(model.graph)
        self.opset = model.opset_imports.get("", 1)
        self.constants = Constants(self.shapes, self.opset)
        self.built: dict[Any, ir.Value] = {}
        self._names = {value.name for node in model.graph for value in node.outputs} | set(model.graph.initializers)

    def shape(self, value: ir.Value) -> Shape:
        """Sizes of a value that a pattern depends on."""
        shape = self.shapes.shape(value)
        if shape is None:
            raise NoMatch(f"the rank of {value.name} is not known")
        return shape

    def constant(self, name: str, array: Any) -> ir.Value:
        """An initializer, shared by everything that asks for the same array."""
        key = ("constant", array.dtype.str, array.shape, array.tobytes())
        if key not in self.built:
            value = ir.Value(name=self._fresh(name), const_value=ir.tensor(array))
            value.shape, value.type = ir.Shape(array.shape), ir.TensorType(ir.DataType.from_numpy(array.dtype))
            self.graph.register_initializer(value)
            self.built[key] = value
        return self.built[key]

    def _fresh(self, name: str) -> str:
        candidate, number = f"attention_{name}", 1
        while candidate in self._names:
            candidate, number = f"attention_{name}_{number}", number + 1
        self._names.add(candidate)
        return candidate


def producer(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """The node that makes a value, if it is one of these operators of ai.onnx. Identity is looked through."""
    node = None if value is None else value.producer()
    while node is not None and is_operator(node, "Identity"):
        source = node.inputs[0]
        node = None if source is None else source.producer()
    return node if node is not None and is_operator(node, *op_types) else None


def is_operator(node: ir.Node, *op_types: str) -> bool:
    return node.domain in ("", "ai.onnx") and node.op_type in op_types


def attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    found = node.attributes.get(name)
    return default if found is None else found.value


def unscaled(subject: Subject, value: ir.Value) -> tuple[float, ir.Value]:
    """A value as (factor, rest) with value = factor * rest: constant scalars multiplied or divided by, as many as there are."""
    factor = 1.0
    while (node := producer(value, "Mul", "Div")) is not None:
        left, right = node.inputs
        if left is None or right is None:
            break
        number = subject.constants.scalar(right)
        rest = left
        if number is None and is_operator(node, "Mul"):
            number, rest = subject.constants.scalar(left), right
        if number is None or (is_operator(node, "Div") and number == 0) or len(subject.shape(rest)) < len(subject.shape(value)):
            break
        factor = factor / number if is_operator(node, "Div") else factor * number
        value = rest
    return factor, value
