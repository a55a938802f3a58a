"""Sizes of axes as numbers or expressions: equal expressions are equal sizes whatever the inputs' sizes are."""

from __future__ import annotations

import ast
import functools
from typing import Any

import numpy as np
import sympy

__all__ = ["Contents", "Shape", "broadcast", "describe", "elements", "is_cut_of", "named_size", "number", "quotient", "symbol"]

Shape = tuple[Any, ...]  # of int or sympy.Expr
Contents = Any  # elements of an integer tensor: a numpy array of dtype object, of int, bool or sympy.Expr


def describe(shape: Shape | None) -> str:
    return "of unknown rank" if shape is None else "[" + ", ".join(str(size) for size in shape) + "]"


def broadcast(*shapes: Shape) -> tuple[Any | None, ...]:
    """The shape of an elementwise operation; None where it cannot be told which operand decides."""
    rank = max(len(shape) for shape in shapes)
    result: list[Any | None] = [1] * rank
    for shape in shapes:
        for axis, size in enumerate(shape, rank - len(shape)):
            known = result[axis]
            if known == 1:
                result[axis] = size
            elif size == 1 or size == known or (isinstance(known, int) and known > 1) or is_cut_of(size, known):
                pass
            elif (isinstance(size, int) and size > 1) or is_cut_of(known, size):
                result[axis] = size
            else:
                result[axis] = None
    return tuple(result)


def is_cut_of(part: Any, size: Any) -> bool:
    """Whether a part is the first rows of a longer table: min(size, 512). It only fits an axis of `size` by being as long."""
    return isinstance(part, sympy.Min) and size in part.args and all(rest == size or (rest.is_Integer and rest > 1) for rest in part.args)


def symbol(name: str) -> Any:
    return sympy.Symbol(name, integer=True, positive=True)


@functools.cache
def named_size(name: str) -> Any:
    """The size that a name of the file stands for. Exporters write names like `batch*seq`: those are read as what they say."""
    if name.isidentifier():
        return symbol(name)
    try:
        return number(sympy.cancel(_evaluated(ast.parse(name, mode="eval").body)))
    except (SyntaxError, ValueError, RecursionError, ZeroDivisionError):
        return symbol(name)


def _evaluated(expression: ast.expr) -> Any:
    if isinstance(expression, ast.Name):
        return symbol(expression.id)
    if isinstance(expression, ast.Constant) and isinstance(expression.value, int):
        return sympy.Integer(expression.value)
    if isinstance(expression, ast.BinOp):
        left, right = _evaluated(expression.left), _evaluated(expression.right)
        if isinstance(expression.op, ast.FloorDiv):
            return quotient(left, right)
        for kind, operation in ((ast.Add, left + right), (ast.Sub, left - right), (ast.Mult, left * right)):
            if isinstance(expression.op, kind):
                return operation
    raise ValueError(f"{ast.dump(expression)} is no size")


def elements(nested: Any) -> Contents:
    """An object array, with bools as bools and numbers as ints or expressions."""
    array = np.empty(np.shape(nested), dtype=object)
    array[...] = nested
    return array


def number(value: Any) -> Any:
    return int(value) if isinstance(value, sympy.Integer) else value


def quotient(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        return int(left / right) if right else sympy.nan
    exact = sympy.cancel(sympy.sympify(left) / right)
    return exact if exact.is_integer else sympy.floor(exact)
