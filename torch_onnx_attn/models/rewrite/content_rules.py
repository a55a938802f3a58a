"""The elements of small integer tensors, operator by operator: what exporters compute the arguments of Reshape and Expand with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import sympy

from torch_onnx_attn.models.rewrite.shape_rules import constant_integers, get_attribute, shape_rule
from torch_onnx_attn.models.rewrite.sizes import Contents, elements, number, quotient

if TYPE_CHECKING:
    from torch_onnx_attn.models.rewrite.symbolic import Shapes

__all__ = ["LARGEST_CONTENTS", "contents_rule"]

LARGEST_CONTENTS = 64  # elements; tensors of shapes are far smaller


def contents_rule(node: ir.Node) -> Callable[[Shapes, ir.Node], Contents | None] | None:
    """A function that gives the elements of the first output, or None where they are not known."""
    return _OF_ONNX.get(node.op_type) if node.domain in ("", "ai.onnx") else None


def _shape_contents(shapes: Shapes, node: ir.Node) -> Contents | None:
    shape = shapes.shape(node.inputs[0])
    if shape is None:
        return None
    return elements(list(shape[get_attribute(node, "start", 0) : get_attribute(node, "end", len(shape))]))


def _same_contents(shapes: Shapes, node: ir.Node) -> Contents | None:
    return shapes.contents(node.inputs[0])


def _cast_contents(shapes: Shapes, node: ir.Node) -> Contents | None:
    return shapes.contents(node.inputs[0]) if get_attribute(node, "to", 0) in (ir.DataType.INT64, ir.DataType.INT32) else None


def _gather_contents(shapes: Shapes, node: ir.Node) -> Contents | None:
    data, indices = shapes.contents(node.inputs[0]), shapes.contents(node.inputs[1])
    if data is None or indices is None or data.ndim != 1 or not all(isinstance(index, int) for index in indices.reshape(-1)):
        return None
    picked = elements(np.zeros(indices.shape).tolist())
    for position, index in np.ndenumerate(indices):
        if not -len(data) <= index < len(data):
            return None
        picked[position] = data[index]
    return picked


def _slice_contents(shapes: Shapes, node: ir.Node) -> Contents | None:
    data = shapes.contents(node.inputs[0])
    starts, ends = (constant_integers(shapes, value) for value in node.inputs[1:3])
    steps = constant_integers(shapes, node.inputs[4]) if len(node.inputs) > 4 and node.inputs[4] is not None else [1]
    if data is None or data.ndim != 1 or starts is None or ends is None or steps is None:
        return None
    return data[starts[0] : ends[0] : steps[0]]


def _concat_contents(shapes: Shapes, node: ir.Node) -> Contents | None:
    parts = [shapes.contents(value) for value in node.inputs]
    if any(part is None or part.ndim != 1 for part in parts):
        return None
    return np.concatenate([part for part in parts if part is not None])


def _reshaped_contents(shapes: Shapes, node: ir.Node) -> Contents | None:
    """Of Squeeze, Unsqueeze and Reshape, as long as the result has rank 0 or 1."""
    data = shapes.contents(node.inputs[0])
    rule = shape_rule(node)
    shape = None if rule is None else rule(shapes, node)
    if shape is None and node.op_type == "Squeeze" and data is not None and data.size == 1:  # without axes
        shape = ()
    return None if data is None or shape is None or len(shape) > 1 else data.reshape(() if shape == () else (-1,))


def _filled_contents(shapes: Shapes, node: ir.Node) -> Contents | None:
    sizes = constant_integers(shapes, node.inputs[0])
    if sizes is None or len(sizes) > 1 or math.prod(sizes) > LARGEST_CONTENTS:
        return None
    fill = get_attribute(node, "value", None)
    filler = 0 if fill is None else fill.numpy().reshape(-1)[0].item()
    return elements(np.full(sizes, filler, dtype=object).tolist()) if isinstance(filler, int) else None


def _arithmetic(operation: Callable[[Any, Any], Any]) -> Callable[[Shapes, ir.Node], Contents | None]:
    def contents(shapes: Shapes, node: ir.Node) -> Contents | None:
        left, right = (shapes.contents(value) for value in node.inputs)
        if left is None or right is None:
            return None
        left, right = np.broadcast_arrays(left, right)
        result = elements(np.zeros(left.shape).tolist())
        for position in np.ndindex(*left.shape):
            result[position] = number(operation(left[position], right[position]))
        return result

    return contents


def _where_contents(shapes: Shapes, node: ir.Node) -> Contents | None:
    condition, kept, other = (shapes.contents(value) for value in node.inputs)
    if condition is None or kept is None or other is None or not all(isinstance(element, bool) for element in condition.reshape(-1)):
        return None
    condition, kept, other = np.broadcast_arrays(condition, kept, other)
    result = elements(np.zeros(condition.shape).tolist())
    for position in np.ndindex(*condition.shape):
        result[position] = kept[position] if condition[position] else other[position]
    return result


def _equal_contents(shapes: Shapes, node: ir.Node) -> Contents | None:
    """A size, which a symbol stands for, is never equal to a negative number."""

    def equal(left: Any, right: Any) -> Any:
        if left == right:
            return True
        difference = sympy.sympify(left) - right
        return False if difference.is_zero is False else None

    result = _arithmetic(equal)(shapes, node)
    return None if result is None or any(element is None for element in result.reshape(-1)) else result


_OF_ONNX: dict[str, Callable[[Shapes, ir.Node], Contents | None]] = {
    "Shape": _shape_contents,
    "Identity": _same_contents,
    "Cast": _cast_contents,
    "Gather": _gather_contents,
    "Slice": _slice_contents,
    "Concat": _concat_contents,
    **dict.fromkeys(("Squeeze", "Unsqueeze", "Reshape"), _reshaped_contents),
    "ConstantOfShape": _filled_contents,
    "Add": _arithmetic(lambda left, right: left + right),
    "Sub": _arithmetic(lambda left, right: left - right),
    "Mul": _arithmetic(lambda left, right: left * right),
    "Div": _arithmetic(quotient),
    "Where": _where_contents,
    "Equal": _equal_contents,
}
