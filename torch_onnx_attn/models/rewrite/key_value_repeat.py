"""The repetition of key/value heads for grouped queries, which an Attention node does by itself.

Attention lets query head h read kv head h // group, so only a repetition that puts the copies of a head side by side is one:
[k0, k0, k1, k1]. Tiling the heads gives [k0, k1, k0, k1], which is something else unless there is a single head.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from torch_onnx_attn.models.rewrite.sizes import Shape
from torch_onnx_attn.models.rewrite.subject import Subject, attribute, producer

__all__ = ["unrepeated"]


def unrepeated(subject: Subject, value: ir.Value, head_axis: int) -> ir.Value | None:
    """The value before its heads (along `head_axis` of 4) were repeated side by side; None if they were not."""
    for form in (_expanded_and_merged, _gathered, _one_head_spread):
        source = form(subject, value, head_axis)
        if source is not None:
            return source
    return None


def _expanded_and_merged(subject: Subject, value: ir.Value, head_axis: int) -> ir.Value | None:
    """[.., heads, ..] -> [.., heads, 1, ..] -> [.., heads, copies, ..] -> [.., heads * copies, ..]; the last step may be missing."""
    after = subject.shapes.shape(value)
    copies = _copies(value, after)
    lifted = None if copies is None else copies.inputs[0]
    if copies is None or after is None or (copies.op_type == "Concat" and any(part is not lifted for part in copies.inputs)):
        return None
    lift = producer(lifted, "Unsqueeze", "Reshape")
    source = None if lift is None else lift.inputs[0]
    before, spread = subject.shapes.shape(source), subject.shapes.shape(copies.outputs[0])
    if source is None or before is None or spread is None or len(before) != 4 or len(spread) != 5:
        return None
    outer, heads, inner, group = before[:head_axis], before[head_axis], before[head_axis + 1 :], spread[head_axis + 1]
    if not isinstance(heads, int) or not isinstance(group, int):
        return None
    if subject.shapes.shape(lifted) != (*outer, heads, 1, *inner) or spread != (*outer, heads, group, *inner):
        return None
    return source if after in (spread, (*outer, heads * group, *inner)) else None


def _copies(value: ir.Value, shape: Shape | None) -> ir.Node | None:
    """The node that makes the copies: behind a Reshape that merges them with the heads, unless the axes are still apart."""
    if shape is not None and len(shape) == 5:
        return producer(value, "Expand", "Tile", "Concat")
    merge = producer(value, "Reshape")
    return None if merge is None else producer(merge.inputs[0], "Expand", "Tile", "Concat")


def _gathered(subject: Subject, value: ir.Value, head_axis: int) -> ir.Value | None:
    """Gather along the heads with the constant indices 0, 0, ..., 1, 1, ..."""
    node = producer(value, "Gather")
    source = None if node is None else node.inputs[0]
    if node is None or source is None:
        return None
    indices, shape = subject.constants.array(node.inputs[1]), subject.shapes.shape(source)
    if indices is None or shape is None or len(shape) != 4 or indices.ndim != 1 or not isinstance(shape[head_axis], int):
        return None
    heads = shape[head_axis]
    if attribute(node, "axis", 0) % 4 != head_axis or len(indices) % heads:
        return None
    return source if np.array_equal(indices, np.repeat(np.arange(heads), len(indices) // heads)) else None


def _one_head_spread(subject: Subject, value: ir.Value, head_axis: int) -> ir.Value | None:
    """Expand or Tile of a single head to many."""
    node = producer(value, "Expand", "Tile")
    source = None if node is None else node.inputs[0]
    before, after = subject.shapes.shape(source), subject.shapes.shape(value)
    if before is None or after is None or len(before) != 4 or len(after) != 4 or before[head_axis] != 1:
        return None
    return source if after == (*before[:head_axis], after[head_axis], *before[head_axis + 1 :]) else None
