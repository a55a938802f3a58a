"""Batch and heads as one axis, [batch * heads, rows, keys], as torch.bmm wants them and many an older model has them.

Masks are added to a view of the scores as [batch, heads, rows, keys], so that view says how to take the axis apart again. Q, K and V
must come from, and the result go to, tensors in which it is apart; the Reshape nodes in between are then not needed.
"""

from __future__ import annotations

import onnx_ir as ir

from torch_onnx_attn.models.rewrite.no_match import NoMatch
from torch_onnx_attn.models.rewrite.operand import Operand
from torch_onnx_attn.models.rewrite.sizes import Shape, describe
from torch_onnx_attn.models.rewrite.subject import Subject, is_operator, producer

__all__ = ["split_operand", "split_output", "split_view"]


def split_view(subject: Subject, node: ir.Node) -> Shape | None:
    """The 4-D side of a Reshape that merges the first two of four axes or splits the first of three; None for any other node."""
    if not is_operator(node, "Reshape"):
        return None
    before, after = subject.shapes.shape(node.inputs[0]), subject.shapes.shape(node.outputs[0])
    if before is None or after is None or {len(before), len(after)} != {3, 4} or before[-2:] != after[-2:]:
        return None
    return before if len(before) == 4 else after


def split_operand(subject: Subject, operand: Operand, view: Shape) -> Operand:
    """Q, K or V before its heads were merged with the batch; itself if they were not."""
    if len(operand.shape) == 4:
        return operand
    reshape = producer(operand.value, "Reshape") if operand.permutation is None else None
    source = None if reshape is None else reshape.inputs[0]
    shape = (*view[:2], *operand.shape[1:])
    if source is None or subject.shapes.shape(source) != shape:
        raise NoMatch(f"{operand.value.name} has batch and heads in one axis and does not come from a tensor of shape {describe(shape)}")
    return Operand(source, None, shape)


def split_output(subject: Subject, output: ir.Value, view: Shape) -> ir.Value:
    """The result after the axis was taken apart; itself if it never was one."""
    if len(subject.shape(output)) == 4:
        return output
    users = [user for user, _ in output.uses()]
    shape = (*view[:2], *subject.shape(output)[1:])
    if len(users) != 1 or users[0].graph is not subject.graph or output.is_graph_output() or not is_operator(users[0], "Reshape"):
        raise NoMatch("the result has batch and heads in one axis, and something else than a Reshape reads it")
    if subject.shapes.shape(users[0].outputs[0]) != shape:
        raise NoMatch(f"the result has batch and heads in one axis, and is not reshaped to {describe(shape)}")
    return users[0].outputs[0]
