"""The splitting of [batch, length, heads * size] into heads and its undoing, which an Attention node with head counts does by itself."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from torch_onnx_attn.models.rewrite.decomposed import Decomposed
from torch_onnx_attn.models.rewrite.operand import Operand
from torch_onnx_attn.models.rewrite.subject import Subject, attribute, is_operator, producer

__all__ = ["Joined", "joined"]


@dataclasses.dataclass(frozen=True)
class Joined:
    """Q, K and V with their heads still side by side, and the value downstream that has them so again."""

    query: ir.Value
    key: ir.Value
    value: ir.Value
    q_num_heads: int
    kv_num_heads: int
    output: ir.Value


def joined(subject: Subject, found: Decomposed) -> Joined | None:
    """The 3-D form of an attention, if Q, K, V and the result all have it; otherwise the splits stay where they are."""
    if len(found.query.shape) == 3:
        return None
    values = [_before_split(subject, operand) for operand in (found.query, found.key, found.value)]
    output = _after_merge(subject, found.output)
    if output is None or any(value is None for value in values):
        return None
    query, key, value = (one for one in values if one is not None)
    return Joined(query, key, value, found.query.shape[1], found.key.shape[1], output)


def _before_split(subject: Subject, operand: Operand) -> ir.Value | None:
    """x, where the operand is Transpose(Reshape(x, [batch, length, heads, size]), [0, 2, 1, 3])."""
    value = operand.value
    if operand.permutation is None:
        transpose = producer(value, "Transpose")
        if transpose is None or list(attribute(transpose, "perm", ())) != [0, 2, 1, 3] or transpose.inputs[0] is None:
            return None
        value = transpose.inputs[0]
    elif operand.permutation != (0, 2, 1, 3):
        return None
    reshape = producer(value, "Reshape")
    source = None if reshape is None else reshape.inputs[0]
    shape = subject.shapes.shape(source)
    batch, heads, length, size = operand.shape
    return source if shape == (batch, length, heads * size) else None


def _after_merge(subject: Subject, output: ir.Value) -> ir.Value | None:
    """Reshape(Transpose(output, [0, 2, 1, 3]), [batch, rows, heads * size]), if nobody reads what is between.

    If the Reshape makes another shape of the same elements in order, it stays, and the Transpose alone is taken over.
    """
    batch, heads, rows, size = subject.shape(output)
    transpose = _only_user(subject, output)
    if transpose is None or not is_operator(transpose, "Transpose") or list(attribute(transpose, "perm", ())) != [0, 2, 1, 3]:
        return None
    reshape = _only_user(subject, transpose.outputs[0])
    if reshape is None or not is_operator(reshape, "Reshape") or reshape.inputs[0] is not transpose.outputs[0]:
        return None
    if subject.shapes.shape(reshape.outputs[0]) == (batch, rows, heads * size):
        return reshape.outputs[0]
    target = subject.shapes.contents(reshape.inputs[1])
    copies_no_axis = target is not None and 0 not in target.tolist()
    return transpose.outputs[0] if copies_no_axis else None


def _only_user(subject: Subject, value: ir.Value) -> ir.Node | None:
    users = [user for user, _ in value.uses()]
    return users[0] if len(users) == 1 and users[0].graph is subject.graph and not value.is_graph_output() else None
