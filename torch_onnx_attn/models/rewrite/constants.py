"""Values of a graph that do not depend on its inputs, computed where the file does not store them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from torch_onnx_attn.models.rewrite.symbolic import Shapes

__all__ = ["Constants"]

_LARGEST = 2**24  # elements that are computed; a causal mask of 4096 positions
_RANDOM = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial", "Dropout"}


class Constants:
    """Evaluates on demand, by onnx.reference, one node at a time."""

    def __init__(self, shapes: Shapes, opset: int) -> None:
        self._shapes = shapes
        self._opset = opset
        self._arrays: dict[ir.Value, Any] = {}

    def array(self, value: ir.Value | None) -> Any | None:
        """The value as a numpy array, or None if it is not constant (an initializer that is also an input is not)."""
        if value is None:
            return None
        pending = [value]
        while pending:  # deep graphs would exhaust recursion
            current = pending[-1]
            if current in self._arrays:
                pending.pop()
                continue
            missing = [operand for operand in self._operands(current) if operand not in self._arrays]
            if missing:
                pending.extend(missing)
            else:
                self._arrays[current] = self._evaluate(current)
                pending.pop()
        return self._arrays[value]

    def scalar(self, value: ir.Value | None) -> float | None:
        """The only element of a constant, whatever its rank, as a float."""
        array = self.array(value)
        if array is None or array.size != 1 or array.dtype == bool:
            return None
        return float(array.reshape(()))

    def _operands(self, value: ir.Value) -> list[ir.Value]:
        node = value.producer()
        if node is None or not self._may_compute(node):
            return []
        return [operand for operand in node.inputs if operand is not None]

    def _may_compute(self, node: ir.Node) -> bool:
        return (
            node.domain in ("", "ai.onnx")
            and node.op_type not in _RANDOM
            and len(node.outputs) == 1
            and not any(attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for attribute in node.attributes.values())
        )

    def _evaluate(self, value: ir.Value) -> Any | None:
        if value.is_graph_input():
            return None
        stored = ir.convenience.get_const_tensor(value)
        if stored is not None:
            return stored.numpy()
        node = value.producer()
        if node is None or not self._may_compute(node):
            return None
        contents = self._shapes.contents(value)
        if contents is not None and value.dtype is not None and all(isinstance(element, int) for element in contents.reshape(-1)):
            return contents.astype(value.dtype.numpy())
        operands = [None if operand is None else self._arrays[operand] for operand in node.inputs]
        if any(operand is not None and array is None for operand, array in zip(node.inputs, operands, strict=True)):
            return None
        if self._is_large(value):
            return None
        return self._run(node, operands)

    def _is_large(self, value: ir.Value) -> bool:
        shape = self._shapes.shape(value)
        elements = 1
        for size in shape or ():
            if not isinstance(size, int):
                return True
            elements *= size
        return shape is None or elements > _LARGEST

    def _run(self, node: ir.Node, operands: list[Any]) -> Any | None:
        from onnx.reference import ReferenceEvaluator

        feeds = {operand.name: array for operand, array in zip(node.inputs, operands, strict=True) if operand is not None}
        try:
            evaluator: Any = ReferenceEvaluator(ir.to_proto(node), opsets={"": self._opset})
            with np.errstate(all="ignore"):
                return np.asarray(evaluator.run(None, feeds)[0])
        except Exception:  # an operator that onnx.reference lacks: then the value counts as not known
            return None
