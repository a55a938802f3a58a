"""Whether a mask is provably "key j <= query i" and nothing else, whatever the sizes.

Two proofs: the mask is a constant whose every element is looked at; or it is built from Range, Trilu, comparisons and Where, and
reading these gives for the element at row i and column j one condition on j - i.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import onnx_ir as ir
import sympy

from torch_onnx_attn.models.rewrite.subject import Subject, attribute, producer

__all__ = ["is_causal_bias", "is_causal_keep"]

_EXCLUDES = -1e8  # a bias at or below leaves a key exactly no weight beside an allowed one: no score comes near; so does -inf
_ROW, _COLUMN = sympy.symbols("row column", integer=True)


@dataclasses.dataclass(frozen=True)
class _Condition:
    """True where column - row <= limit; the other way round if negated."""

    limit: int
    negated: bool = False


@dataclasses.dataclass(frozen=True)
class _Choice:
    """One number where the condition holds, another elsewhere."""

    condition: _Condition
    kept: float
    other: float


def is_causal_bias(subject: Subject, value: ir.Value) -> bool:
    """Of a mask that is added: 0 where column <= row, excluding elsewhere."""
    array = subject.constants.array(value)
    if array is not None:
        visible = _lower_triangle(array)
        return visible is not None and bool((array[..., visible] == 0).all() and (array[..., ~visible] <= _EXCLUDES).all())
    element = _element(subject, value, 0)
    if not isinstance(element, _Choice) or element.condition.limit != 0:
        return False
    kept, other = (element.other, element.kept) if element.condition.negated else (element.kept, element.other)
    return kept == 0 and other <= _EXCLUDES


def is_causal_keep(subject: Subject, value: ir.Value, keeps: bool) -> bool:
    """Of a condition: it equals `keeps` exactly where column <= row."""
    array = subject.constants.array(value)
    if array is not None:
        visible = _lower_triangle(array)
        if visible is None or array.dtype != bool:
            return False
        return bool((array[..., visible] == keeps).all() and (array[..., ~visible] != keeps).all())
    return bool(_element(subject, value, 0) == _Condition(0, negated=not keeps))


def _lower_triangle(array: Any) -> Any | None:
    return np.tri(*array.shape[-2:], dtype=bool) if array.ndim >= 2 and array.size else None


def _element(subject: Subject, value: ir.Value | None, depth: int) -> Any:
    """What stands at row `_ROW` and column `_COLUMN`: a number, an expression of the two, a _Condition, a _Choice or None.

    A value of fewer rows or columns stands for itself repeated, as in broadcasting.
    """
    if value is None or depth > 32:
        return None
    number = _number(subject, value)
    if number is not None:
        return number
    node = producer(value, *_READ)
    return None if node is None else _READ[node.op_type](subject, node, depth + 1)


def _number(subject: Subject, value: ir.Value) -> Any:
    array = subject.constants.array(value)
    return array.reshape(()).item() if array is not None and array.size == 1 else None


def _through(subject: Subject, node: ir.Node, depth: int) -> Any:
    return _element(subject, node.inputs[0], depth)


def _range(subject: Subject, node: ir.Node, depth: int) -> Any:
    """On its own it lies along the last axis; `_placed` looks whether it was moved before it comes here."""
    return _COLUMN if _counts_from_zero(subject, node.outputs[0]) else None


def _placed(subject: Subject, node: ir.Node, depth: int) -> Any:
    """Unsqueeze and Reshape: a Range becomes the row or the column, by where its axis ends up."""
    shape = subject.shapes.shape(node.outputs[0])
    source = node.inputs[0]
    if shape is None or source is None:
        return None
    long = [(axis - len(shape), size) for axis, size in enumerate(shape) if size != 1]
    if _counts_from_zero(subject, source) and len(long) == 1 and long[0][0] in (-1, -2):
        return _COLUMN if long[0][0] == -1 else _ROW
    before = subject.shapes.shape(source)
    kept = None if before is None else [(axis - len(before), size) for axis, size in enumerate(before) if size != 1]
    return _element(subject, source, depth) if kept == long else None


def _counts_from_zero(subject: Subject, value: ir.Value | None) -> bool:
    """Whether the elements in order are 0, 1, 2, ..., along the only axis that is not of size 1."""
    while (node := producer(value, "Unsqueeze", "Reshape", "Cast")) is not None:
        value = node.inputs[0]
        shape = None if value is None else subject.shapes.shape(value)
        if shape is None or sum(size != 1 for size in shape) > 1:
            return False
    node = producer(value, "Range")
    return node is not None and bool([_number(subject, bound) for bound in (node.inputs[0], node.inputs[2]) if bound is not None] == [0, 1])


def _cast(subject: Subject, node: ir.Node, depth: int) -> Any:
    element = _element(subject, node.inputs[0], depth)
    if attribute(node, "to") == ir.DataType.BOOL:
        return _differs_from_zero(element)
    return _Choice(element, 1, 0) if isinstance(element, _Condition) else element


def _differs_from_zero(element: Any) -> Any:
    if isinstance(element, _Choice) and (element.kept == 0) != (element.other == 0):
        return element.condition if element.other == 0 else _opposite(element.condition)
    return element if isinstance(element, (bool, _Condition)) else None


def _opposite(element: Any) -> Any:
    if isinstance(element, _Condition):
        return dataclasses.replace(element, negated=not element.negated)
    return not element if isinstance(element, bool) else None


def _not(subject: Subject, node: ir.Node, depth: int) -> Any:
    return _opposite(_element(subject, node.inputs[0], depth))


def _equal(subject: Subject, node: ir.Node, depth: int) -> Any:
    left, right = (_element(subject, operand, depth) for operand in node.inputs)
    if not isinstance(right, bool) and right == 0:
        return _opposite(_differs_from_zero(left))
    return None


def _and(subject: Subject, node: ir.Node, depth: int) -> Any:
    left, right = (_element(subject, operand, depth) for operand in node.inputs)
    if left is True:
        return right
    return left if right is True else None


def _compared(subject: Subject, node: ir.Node, depth: int) -> Any:
    left, right = (_element(subject, operand, depth) for operand in node.inputs)
    if not isinstance(left, (int, sympy.Expr)) or not isinstance(right, (int, sympy.Expr)):
        return None
    smaller, larger = (right, left) if node.op_type.startswith("Greater") else (left, right)
    difference = sympy.expand(sympy.sympify(smaller) - larger)  # <= 0, or < 0
    if not node.op_type.endswith("OrEqual"):
        difference = difference + 1
    ahead, behind = difference - (_COLUMN - _ROW), difference - (_ROW - _COLUMN)
    if ahead.is_Integer:  # column - row + ahead <= 0
        return _Condition(int(-ahead))
    if behind.is_Integer:  # row - column + behind <= 0, so column - row >= behind
        return _Condition(int(behind) - 1, negated=True)
    return None


def _arithmetic(subject: Subject, node: ir.Node, depth: int) -> Any:
    left, right = (_element(subject, operand, depth) for operand in node.inputs)
    if not isinstance(left, (int, sympy.Expr)) or not isinstance(right, (int, sympy.Expr)):
        return None
    return left + right if node.op_type == "Add" else left - right


def _where(subject: Subject, node: ir.Node, depth: int) -> Any:
    condition, kept, other = (_element(subject, operand, depth) for operand in node.inputs)
    if isinstance(condition, _Condition) and isinstance(kept, (int, float)) and isinstance(other, (int, float)):
        return _Choice(condition, kept, other)
    return None


def _trilu(subject: Subject, node: ir.Node, depth: int) -> Any:
    element = _element(subject, node.inputs[0], depth)
    diagonal = 0 if len(node.inputs) < 2 else _number(subject, node.inputs[1])  # type: ignore[arg-type]
    if not isinstance(element, (bool, int, float)) or not isinstance(diagonal, int):
        return None
    if attribute(node, "upper", 1):
        condition: Any = _Condition(diagonal - 1, negated=True)
    else:
        condition = _Condition(diagonal)
    if isinstance(element, bool):
        return condition if element else None
    return _Choice(condition, element, 0)


def _filled(subject: Subject, node: ir.Node, depth: int) -> Any:
    fill = attribute(node, "value")
    number = 0.0 if fill is None else fill.numpy().reshape(()).item() if fill.size == 1 else math.nan
    return number


_READ: dict[str, Any] = {
    "Expand": _through,
    "Range": _range,
    **dict.fromkeys(("Unsqueeze", "Reshape"), _placed),
    "Cast": _cast,
    "Not": _not,
    "Equal": _equal,
    "And": _and,
    **dict.fromkeys(("Less", "LessOrEqual", "Greater", "GreaterOrEqual"), _compared),
    **dict.fromkeys(("Add", "Sub"), _arithmetic),
    "Where": _where,
    "Trilu": _trilu,
    "ConstantOfShape": _filled,
}
