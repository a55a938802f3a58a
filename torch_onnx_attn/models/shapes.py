"""Types and shapes of the values in a model, for given shapes of its inputs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Mapping
from typing import Any

from .file import all_graphs
from .node import AttentionNode, find_nodes
from .packages import onnx
from .session import onnxruntime_session

__all__ = ["Kind", "infer"]


@dataclasses.dataclass(frozen=True)
class Kind:
    """The type of a value, by onnx's number, and its shape; a dimension that is not known is None, an unknown rank too."""

    dtype: int
    shape: tuple[int | None, ...] | None

    @property
    def is_known(self) -> bool:
        return self.shape is not None and None not in self.shape

    def __str__(self) -> str:
        name = {1: "float32", 11: "float64"}.get(self.dtype, onnx.TensorProto.DataType.Name(self.dtype).lower())
        return name if self.shape is None else f"{name}[{', '.join('?' if size is None else str(size) for size in self.shape)}]"


def infer(model: Any, shapes: Mapping[str, tuple[int, ...]], folder: str | os.PathLike[str]) -> dict[str, Kind]:
    """What can be known of every value in the model, those of subgraphs included.

    onnx infers; it does not know the operators of com.microsoft, so the shape of a MultiHeadAttention is filled in here, and ONNX
    Runtime, where it is installed, is asked for what is still missing. A value that nobody knows is absent.
    """
    bound = onnx.ModelProto()
    bound.CopyFrom(model)
    for value in bound.graph.input:
        if value.name in shapes and value.type.HasField("tensor_type"):
            value.type.tensor_type.shape.Clear()
            for size in shapes[value.name]:
                value.type.tensor_type.shape.dim.add().dim_value = size
    nodes = find_nodes(model)
    kinds = _inferred(bound)
    while True:
        added = _multi_head_attention_outputs(nodes, kinds)
        if not added:
            break
        for name, kind in added.items():
            bound.graph.value_info.append(onnx.helper.make_tensor_value_info(name, kind.dtype, kind.shape))
        kinds = _inferred(bound) | added
    wanted = {value for node in nodes if not node.place for value in node.inputs.values()}
    missing = [name for name in wanted if name not in kinds or not kinds[name].is_known]
    return kinds | _asked_of_onnxruntime(model, shapes, missing, folder) if missing else kinds


def _inferred(model: Any) -> dict[str, Kind]:
    with contextlib.suppress(Exception):  # over 2 GiB, or a graph that makes no sense: then only what it says of itself is known
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    kinds = {}
    for graph in all_graphs(model.graph):
        for tensor in graph.initializer:
            kinds[tensor.name] = Kind(tensor.data_type, tuple(tensor.dims))
        for value in (*graph.input, *graph.value_info, *graph.output):
            kind = value.type.tensor_type
            if not kind.elem_type:
                continue
            shape = (
                tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in kind.shape.dim) if kind.HasField("shape") else None
            )
            kinds[value.name] = Kind(kind.elem_type, shape)
    return kinds


def _multi_head_attention_outputs(nodes: Iterable[AttentionNode], kinds: Mapping[str, Kind]) -> dict[str, Kind]:
    """The first outputs of the MultiHeadAttention nodes whose inputs are known and whose output is not."""
    added = {}
    for node in nodes:
        output = node.outputs.get("output")
        query = kinds.get(node.inputs.get("query", ""))
        if node.op != "mha" or node.place or output is None or output in kinds or query is None or query.shape is None:
            continue
        if len(query.shape) not in (3, 5):
            continue
        value = kinds.get(node.inputs.get("value", ""))
        batch, rows, *rest = query.shape
        hidden = rest[0]
        if len(rest) == 3:
            hidden = _product(rest[0], rest[2])
        elif value is not None and value.shape is not None and len(value.shape) in (3, 4):
            hidden = value.shape[2] if len(value.shape) == 3 else _product(value.shape[1], value.shape[3])
        added[output] = Kind(query.dtype, (batch, rows, hidden))
    return added


def _product(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one * other


def _asked_of_onnxruntime(
    model: Any, shapes: Mapping[str, tuple[int, ...]], names: list[str], folder: str | os.PathLike[str]
) -> dict[str, Kind]:
    bound = onnx.ModelProto()
    bound.CopyFrom(model)
    del bound.graph.output[:]
    for value in bound.graph.input:
        if value.name in shapes:
            value.type.tensor_type.shape.Clear()
            for size in shapes[value.name]:
                value.type.tensor_type.shape.dim.add().dim_value = size
    bound.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    try:
        session = onnxruntime_session(bound, folder)
    except Exception:  # not installed, or it refuses the model
        return {}
    return {value.name: kind for value in session.get_outputs() if (kind := _kind_of(value)) is not None}


def _kind_of(value: Any) -> Kind | None:
    """Type and shape that ONNX Runtime knows of an output."""
    names = {"float": 1, "float16": 10, "double": 11, "bfloat16": 16, "int64": 7, "int32": 6, "bool": 9}
    dtype = names.get(value.type.removeprefix("tensor(").removesuffix(")"))
    if dtype is None:
        return None
    shape = None if value.shape is None else tuple(size if isinstance(size, int) else None for size in value.shape)
    return Kind(dtype, shape)
