"""Q, K or V as a rewrite finds them: a value of the graph, and what it takes to have it in the layout of the node."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from torch_onnx_attn.models.rewrite.sizes import Shape
from torch_onnx_attn.models.rewrite.subject import Subject

__all__ = ["Operand"]


@dataclasses.dataclass(frozen=True)
class Operand:
    """Q, K or V as [batch, heads, length, size] (or [batch, length, size]): a value, transposed by `permutation` unless None.

    A value of rank 5 has its heads as [kv heads, copies], not merged yet.
    """

    value: ir.Value
    permutation: tuple[int, ...] | None
    shape: Shape

    def build(self, subject: Subject, tape: ir.tape.Tape) -> ir.Value:
        if len(subject.shape(self.value)) == 5:
            merged = subject.constant("merged", np.array([0, self.shape[1], -1, self.shape[3]], np.int64))
            return tape.op("Reshape", [self.value, merged])
        return self.value if self.permutation is None else tape.op("Transpose", [self.value], {"perm": list(self.permutation)})
