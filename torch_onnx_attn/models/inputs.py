"""What a model is run with: arrays from an .npz file, and made-up ones where there are none."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

from ..archive import read_archive
from ..bad_input import BadInput
from .node import AttentionNode
from .packages import numpy, onnx

__all__ = ["Sizes", "graph_inputs", "input_shapes", "make_up", "read_arrays"]

_MOST_ELEMENTS = 2**59  # their bytes still have an int64 number

Sizes = Mapping[str, int]  # what --dim gives: sizes of symbolic dimensions by name


@dataclasses.dataclass(frozen=True)
class GraphInput:
    """One input of a graph that is no initializer. `shape` holds ints and the names of symbolic dimensions; None: rank unknown."""

    name: str
    dtype: Any  # numpy's; None: it is no tensor
    shape: tuple[int | str, ...] | None


def graph_inputs(model: Any) -> list[GraphInput]:
    """The inputs that somebody has to give."""
    initializers = {tensor.name for tensor in model.graph.initializer}
    inputs = []
    for value in model.graph.input:
        if value.name in initializers:
            continue
        if not value.type.HasField("tensor_type") or not value.type.tensor_type.elem_type:
            inputs.append(GraphInput(value.name, None, None))
            continue
        kind = value.type.tensor_type
        shape = None
        if kind.HasField("shape"):
            shape = tuple(
                dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else dim.dim_param or f"{value.name}.{axis}"
                for axis, dim in enumerate(kind.shape.dim)
            )
        inputs.append(GraphInput(value.name, onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type), shape))
    return inputs


def input_shapes(model: Any, sizes: Sizes, other: int, batch: int, given: Mapping[str, Any] | None = None) -> dict[str, tuple[int, ...]]:
    """A shape for every graph input: those of the given arrays, else with `sizes` for its symbolic dimensions.

    A dimension that `sizes` leaves open takes the size that a given array has there; else `batch` if it is called b, n or something
    with "batch" in it; else `other`.
    """
    inputs = graph_inputs(model)
    known = dict(sizes)
    for entry in inputs:
        if given and entry.name in given and entry.shape is not None and len(entry.shape) == given[entry.name].ndim:
            for dim, size in zip(entry.shape, given[entry.name].shape, strict=True):
                if isinstance(dim, str):
                    known.setdefault(dim, size)
    unused = sorted(set(sizes) - {dim for entry in inputs for dim in entry.shape or () if isinstance(dim, str)})
    if unused:
        names = sorted({dim for entry in inputs for dim in entry.shape or () if isinstance(dim, str)})
        raise BadInput(f"--dim {unused[0]}: no input has such a dimension; there are {', '.join(names) or 'none'}")
    shapes = {}
    for entry in inputs:
        if given and entry.name in given:
            shapes[entry.name] = tuple(given[entry.name].shape)
        elif entry.shape is not None:
            shapes[entry.name] = tuple(_size(dim, known, other, batch) for dim in entry.shape)
    for name, shape in shapes.items():
        if max(math.prod(shape), *shape, 0) > _MOST_ELEMENTS:
            raise BadInput(f"input {name}: shape {list(shape)} is larger than any array can be; --dim sets smaller sizes")
    return shapes


def _size(dim: int | str, known: Sizes, other: int, batch: int) -> int:
    if isinstance(dim, int):
        return dim
    is_batch = "batch" in dim.lower() or dim.lower() in ("b", "n")
    return known.get(dim, batch if is_batch else other)


def read_arrays(path: str | os.PathLike[str], model: Any) -> dict[str, Any]:
    """The arrays of an .npz file, each the input of its name.

    Raises:
        BadInput: not an .npz, a name that is no input, or a type or shape that is not the input's.
    """
    arrays = read_archive(path, "an .npz file of plain arrays (numpy.savez makes them)")
    inputs = {entry.name: entry for entry in graph_inputs(model)}
    for name, array in arrays.items():
        if name not in inputs:
            raise BadInput(f"{path}: {name} is no input of the model; its inputs are {', '.join(inputs)}")
        entry = _tensor(inputs[name])
        if (
            array.dtype != entry.dtype
            and array.dtype.itemsize == entry.dtype.itemsize
            and array.dtype.kind in "Vu"
            and entry.dtype.kind not in "biuf"
        ):
            arrays[name] = array = array.view(entry.dtype)  # numpy.savez keeps bfloat16 as two nameless bytes
        if array.dtype != entry.dtype:
            raise BadInput(f"{path}: {name} is {array.dtype}, but the model takes {entry.dtype}")
        fits = entry.shape is None or (
            len(entry.shape) == array.ndim
            and all(isinstance(dim, str) or dim == size for dim, size in zip(entry.shape, array.shape, strict=True))
        )
        if not fits:
            raise BadInput(f"{path}: {name} has shape {list(array.shape)}, but the model takes {_text(entry.shape or ())}")
    return arrays


def _tensor(entry: GraphInput) -> GraphInput:
    """The same. Raises BadInput for an input that is no tensor."""
    if entry.dtype is None:
        raise BadInput(f"input {entry.name}: is no tensor; models with sequences or optional inputs cannot be run here")
    return entry


def _text(shape: tuple[int | str, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def make_up(
    model: Any,
    nodes: list[AttentionNode],
    given: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    inferred: Mapping[str, Any],
    seed: int,
) -> dict[str, Any]:
    """Arrays for the inputs that are not given: normal numbers, ones for integers, and for the masks and lengths of attention what they
    may hold. `inferred` maps value names to shapes, where known."""
    generator = numpy.random.default_rng(seed)
    roles = {value: (formal, node) for node in nodes for formal, value in node.inputs.items()}
    made = {}
    for entry in graph_inputs(model):
        if entry.name in given:
            continue
        _tensor(entry)
        if entry.name not in shapes:
            raise BadInput(f"input {entry.name}: its rank is not in the model, so no array can be made up; give one with --inputs")
        shape = shapes[entry.name]
        formal, node = roles.get(entry.name, ("", None))
        if entry.dtype.kind == "b" or (formal == "key_padding_mask" and len(shape) > 1):
            array: Any = generator.random(shape) < 0.75
        elif formal in ("nonpad_kv_seqlen", "key_padding_mask") and node is not None:
            array = generator.integers(1, _keys(node, inferred) + 1, shape)
        elif formal in ("write_indices", "past_sequence_length", "cache_indirection"):
            array = numpy.zeros(shape)
        elif entry.dtype.kind in "iu":
            array = numpy.ones(shape)
        else:
            array = generator.standard_normal(shape)
        made[entry.name] = numpy.asarray(array).astype(entry.dtype)
    return made


def _keys(node: AttentionNode, inferred: Mapping[str, Any]) -> int:
    """How many keys of this call a node sees, 1 if that is not known."""
    shape = inferred.get(node.inputs.get("K", node.inputs.get("key", "")))
    size = shape[1 if len(shape) in (3, 5) else 2] if shape and len(shape) >= 3 else None
    return size if isinstance(size, int) and size > 0 else 1
