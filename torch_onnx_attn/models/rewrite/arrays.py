"""Arrays to compare a model with itself on: such that a wrong mask, order of heads or offset shows.

Token numbers differ from place to place and stay below the size of the table that they index; padding masks pad the end and leave
no row without a key, because there ONNX Runtime's own Attention deviates from the ONNX text.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from torch_onnx_attn.models.rewrite.group_query_attention import is_group_query
from torch_onnx_attn.models.rewrite.sizes import Shape, symbol
from torch_onnx_attn.models.rewrite.subject import Subject, attribute, is_operator
from torch_onnx_attn.models.rewrite.symbolic import Shapes

__all__ = ["Sizing", "made_up", "sizings", "symbolic_sizes"]

_PAST = ("past_sequence_length", "past_length", "past_len", "past")
_NEW = ("sequence_length", "seq_length", "seq_len", "seq", "sequence", "q_len", "new_len")
_TOTAL = ("total_sequence_length", "total_length", "total_len", "total", "kv_len")


@dataclasses.dataclass(frozen=True)
class Sizing:
    """How big the symbolic dimensions of a run are: by what they are called, the rest one size after the other."""

    batch: int
    first: int  # of the rest
    step: int  # 0: all alike
    new: int | None = None  # rows that a decoder gets
    past: int | None = None  # rows that its caches hold


_ALIKE = Sizing(2, 8, 0)
_DISTINCT = (Sizing(3, 5, 1), Sizing(3, 5, 0))  # the latter for models whose dimensions of different names must be equal
_DECODER = (Sizing(2, 8, 0, new=1), Sizing(1, 5, 1, new=3), Sizing(2, 8, 0, past=0))  # one row, some rows, a prompt


def sizings(model: ir.Model) -> list[tuple[Sizing, ...]]:
    """The runs to make; of each tuple the first that the model takes."""
    if any(is_group_query(node) and len(node.inputs) > 3 and node.inputs[3] is not None for node in model.graph):
        return [(sizing,) for sizing in _DECODER]  # GroupQueryAttention takes several new rows behind a past for one entry only
    return [(_ALIKE,), _DISTINCT]


def symbolic_sizes(model: ir.Model, given: Mapping[str, int], sizing: Sizing) -> dict[str, int]:
    """A size for each symbolic dimension of the inputs. A total length is past and new rows together, as decoders' files call them."""
    names = {size.value for value in model.graph.inputs if value.shape is not None for size in value.shape if not isinstance(size, int)}
    named = sorted(name for name in names if name)
    others = itertools.count(sizing.first, sizing.step)
    sizes = {name: sizing.batch if "batch" in name.lower() or name.lower() in ("b", "n") else next(others) for name in named}
    past, new, total = (
        next((name for name in (here, *named) if name in named and (name == here or name.lower() in usual)), None)
        for here, usual in zip(_cache_sizes(model), (_PAST, _NEW, _TOTAL), strict=True)
    )
    for name, size in ((past, sizing.past), (new, sizing.new)):
        if name and size is not None:
            sizes[name] = size
    sizes |= given
    if past and new and total and total not in given:
        sizes[total] = sizes[past] + sizes[new]
    return sizes


def _cache_sizes(model: ir.Model) -> tuple[str | None, str | None, str | None]:
    """What the sizes (past, new, total) are called where a GroupQueryAttention reads and writes its cache."""
    shapes = Shapes(model.graph)
    for node in model.graph:
        if is_group_query(node) and len(node.inputs) > 3 and node.inputs[3] is not None:
            present = node.outputs[1] if len(node.outputs) > 1 else None
            places = ((node.inputs[3], 2), (node.inputs[0], 1), (present, 2))
            past, new, total = (_size_name(shapes.shape(value), axis) for value, axis in places)
            return past, new, total
    return None, None, None


def _size_name(shape: Shape | None, axis: int) -> str | None:
    return None if shape is None or len(shape) <= axis or isinstance(shape[axis], int) else str(shape[axis])


def made_up(model: ir.Model, shapes: Mapping[str, tuple[int, ...]], given: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """An array for each input that is not given."""
    generator = np.random.default_rng(seed)
    subject = Subject(model)
    pads = not any(is_group_query(node) for node in model.graph)  # what stands behind its lengths, anybody may choose
    sizes = {
        size.value: shapes[value.name][axis]
        for value in model.graph.inputs
        if value.shape is not None and value.name is not None and value.name in shapes
        for axis, size in enumerate(value.shape)
        if not isinstance(size, int) and size.value is not None
    }
    arrays = {}
    for value in model.graph.inputs:
        if value.name in given or value.name not in shapes or value.is_initializer() or value.dtype is None:
            continue
        assert value.name is not None
        shape, dtype = shapes[value.name], value.dtype.numpy()
        role = _length_of_cache(model, subject, value, sizes)
        limit = _table_size(subject, value)
        if role is not None:
            array: Any = np.full(shape, role)
        elif dtype.kind == "b":
            array = _flags(shape) if pads else np.ones(shape)
        elif dtype.kind in "iu" and limit is None:
            array = _mask(shape) if pads else np.ones(shape)
        elif dtype.kind in "iu":
            array = generator.integers(0, limit, shape)
        else:
            array = generator.standard_normal(shape)
        arrays[value.name] = np.asarray(array).astype(dtype)
    return arrays


def _mask(shape: tuple[int, ...]) -> Any:
    array = np.ones(shape)
    if len(shape) > 1 and shape[-1] > 2:
        array[0, ..., -(shape[-1] // 4 + 1) :] = 0
    return array


def _flags(shape: tuple[int, ...]) -> Any:
    """True for the keys that count in some models, and for those that do not in others: each row has both. Entries differ."""
    array = np.ones(shape)
    if len(shape) > 1 and shape[-1] > 1:
        for entry in range(shape[0]):
            array[entry, ..., -(1 + (shape[-1] // 4 + entry) % (shape[-1] - 1)) :] = 0
    return array


def _table_size(subject: Subject, value: ir.Value) -> int | None:
    """Rows of the smallest table that these integers index, None if they index none."""
    sizes = []
    for reached in _unchanged(value):
        for user, index in reached.uses():
            if is_operator(user, "Gather") and index == 1 and attribute(user, "axis", 0) == 0:
                table = subject.shapes.shape(user.inputs[0])
                if table is not None and isinstance(table[0], int):
                    sizes.append(table[0])
    return min(sizes, default=None)


def _unchanged(value: ir.Value) -> Iterator[ir.Value]:
    """The value, and what only casts or reshapes make of it."""
    yield value
    for user, index in value.uses():
        if index == 0 and is_operator(user, "Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten"):
            yield from _unchanged(user.outputs[0])


def _length_of_cache(model: ir.Model, subject: Subject, value: ir.Value, sizes: Mapping[str, int]) -> int | None:
    """What GroupQueryAttention's seqlens_k or total_sequence_length must be, if they are inputs, for a full cache."""
    for node in model.graph:
        if not is_group_query(node):
            continue
        index = next((index for index in (5, 6) if index < len(node.inputs) and node.inputs[index] is value), None)
        query, past = subject.shapes.shape(node.inputs[0]), subject.shapes.shape(node.inputs[3]) if len(node.inputs) > 3 else None
        if index is None or query is None:
            continue
        new, held = _size(query[1], sizes), 0 if past is None else _size(past[2], sizes)
        present = subject.shapes.shape(node.outputs[1]) if len(node.outputs) > 1 else None
        is_buffer = past is not None and present is not None and present[2] == past[2]
        total = held if is_buffer else held + new
        return total - 1 if index == 5 else total
    return None


def _size(size: Any, sizes: Mapping[str, int]) -> int:
    return size if isinstance(size, int) else int(size.subs({symbol(name): number for name, number in sizes.items()}))
