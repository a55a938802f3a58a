"""Sizes of the values of a graph as expressions, and contents of its small integer tensors.

ONNX's own shape inference loses a size as soon as it passes through arithmetic on shapes, as in every `view(b, l, -1, d)` that an
exporter writes. Here the contents of small integer tensors are followed too, so a Reshape to [b, l, -1, d] keeps its sizes.
Where nothing is known a size is a symbol of its own, equal to nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import sympy

from torch_onnx_attn.models.rewrite.content_rules import LARGEST_CONTENTS, contents_rule
from torch_onnx_attn.models.rewrite.shape_rules import shape_rule
from torch_onnx_attn.models.rewrite.sizes import Contents, Shape, elements, named_size, symbol

__all__ = ["Shapes"]


class Shapes:
    """Shapes of all values of a graph, and contents of its small integer tensors. Subgraphs are not entered."""

    def __init__(self, graph: ir.Graph) -> None:
        self._shapes: dict[ir.Value, Shape] = {}
        self._contents: dict[ir.Value, Contents] = {}
        for node in graph:
            # A node that lacks what its operator asks for is a fault for others to report; here nothing is known of its output.
            with contextlib.suppress(AttributeError, IndexError, TypeError, ValueError, ZeroDivisionError):
                self._infer(node)

    def _infer(self, node: ir.Node) -> None:
        infer, compute = shape_rule(node), contents_rule(node)
        contents = None if compute is None else compute(self, node)
        if contents is not None and contents.size <= LARGEST_CONTENTS:
            self._contents[node.outputs[0]] = contents
        inferred = None if infer is None else infer(self, node)
        if inferred is None:
            return
        shapes = inferred if node.op_type == "Split" else (inferred,)
        if node.op_type.startswith("Skip"):  # the last output is the sum that was normalised
            shapes = (inferred, None, None, inferred)
        for output, shape in zip(node.outputs, shapes, strict=False):
            if shape is not None:
                self._shapes[output] = self._merge(output, shape)

    def shape(self, value: ir.Value | None) -> Shape | None:
        """Sizes of a value, None if even its rank is unknown."""
        if value is None:
            return None
        if value not in self._shapes:
            declared = _declared(value)
            if declared is None:
                return None
            self._shapes[value] = self._merge(value, (None,) * len(declared))
        return self._shapes[value]

    def take_over(self, new: ir.Value, old: ir.Value) -> None:
        """A value that comes in place of another has its sizes."""
        if old in self._shapes:
            self._shapes[new] = self._shapes[old]

    def contents(self, value: ir.Value | None) -> Contents | None:
        """Elements of a small integer tensor of rank 0 or 1."""
        if value is None:
            return None
        if value not in self._contents:
            array = ir.convenience.get_const_tensor(value)
            if value.is_graph_input() or array is None or array.size > LARGEST_CONTENTS or len(array.shape) > 1:
                return None
            if array.dtype not in (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL):
                return None
            self._contents[value] = elements(array.numpy().tolist())
        return self._contents[value]

    def _merge(self, value: ir.Value, inferred: Sequence[Any | None]) -> Shape:
        declared = _declared(value)
        if declared is None or len(declared) != len(inferred):
            declared = (None,) * len(inferred)
        sizes: list[Any] = []
        for axis, (own, theirs) in enumerate(zip(inferred, declared, strict=True)):
            if isinstance(own, sympy.Integer):
                own = int(own)
            if own is None or (isinstance(theirs, int) and not isinstance(own, int)):
                own = theirs if theirs is not None else symbol(f"{value.name}.{axis}")
            sizes.append(own)
        return tuple(sizes)


def _declared(value: ir.Value) -> Sequence[Any | None] | None:
    if value.shape is None:
        return None
    return [size if isinstance(size, int) else (named_size(size.value) if size.value is not None else None) for size in value.shape]
