"""Opens an ONNX file without trusting it: every way in which it can be unusable is one sentence."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..bad_input import BadInput
from .packages import first_line, ir, onnx

__all__ = ["all_graphs", "external_files", "open_model", "with_weights"]

_LARGEST_MESSAGE = 2**31  # bytes; protobuf parses no more
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # protobuf's wire types


def open_model(path: str | os.PathLike[str]) -> Any:
    """The model in a file, its functions inlined and its external data checked but not read.

    Args:
        path: an ONNX file. Files with external data are looked for beside it, never outside its folder.

    Returns:
        An ``onnx.ModelProto``. `with_weights` reads the external data.

    Raises:
        BadInput: no such file, not ONNX, cut short, external data that is missing, too short or outside the model's folder.
    """
    if not isinstance(path, str | os.PathLike):
        raise BadInput(f"path: is of type {type(path).__name__}, must be the path of an ONNX file")
    file = Path(path)
    if not file.is_file():
        raise BadInput(f"{file}: is a folder, not a model file" if file.is_dir() else f"{file}: there is no such file")
    try:
        content = file.read_bytes()
    except OSError as error:
        raise BadInput(f"{file}: cannot be read: {error.strerror}") from error
    model = _parse(file, content)
    _check_own_data(file, model)
    _check_external_data(file, model)
    _use_one_name_of_the_domain(model)
    return _without_functions(file, model)


def with_weights(model: Any, folder: str | os.PathLike[str]) -> Any:
    """A copy of a model from `open_model` that holds its external data. `folder` is the model file's."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    onnx.load_external_data_for_model(copy, os.fspath(folder))
    return copy


def external_files(model: Any, folder: str | os.PathLike[str]) -> set[Path]:
    """The files that hold the external data of a model whose file is in `folder`."""
    locations = (entry.value for tensor in _tensors(model) for entry in tensor.external_data if entry.key == "location")
    return {Path(os.path.realpath(Path(folder) / location)) for location in locations}


def all_graphs(graph: Any) -> Iterator[Any]:
    """A graph and every graph in the attributes of its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from all_graphs(inner)


def _parse(file: Path, content: bytes) -> Any:
    if not content:
        raise BadInput(f"{file}: is empty")
    model = onnx.ModelProto()
    try:
        model.ParseFromString(content)
    except Exception as error:  # protobuf's DecodeError, whose module depends on the protobuf release
        if len(content) >= _LARGEST_MESSAGE:
            raise BadInput(f"{file}: is larger than 2 GiB, more than an ONNX file can be; its weights belong in external data") from error
        if _is_cut_short(content):
            raise BadInput(f"{file}: is cut short: its {len(content)} bytes end in the middle of the model") from error
        raise BadInput(f"{file}: is not an ONNX model") from error
    if model.HasField("graph") and (model.graph.node or model.graph.output) and not model.opset_import and model.ir_version:
        raise BadInput(f"{file}: is cut short: it ends before the opset that its operators belong to")
    if not model.HasField("graph") or not model.ir_version:
        is_cut = bool(model.ir_version and (model.producer_name or model.opset_import))
        raise BadInput(f"{file}: is cut short: it ends before the graph" if is_cut else f"{file}: is not an ONNX model")
    if _is_damaged(model):
        raise BadInput(f"{file}: is damaged: it holds names that are no text, or types that do not exist")
    return model


def _is_damaged(message: Any) -> bool:
    """Whether a part of the message holds what no writer writes. Protobuf gives text that is not UTF-8 as bytes."""
    for field, value in message.ListFields():
        values = [value] if isinstance(value, (str, bytes, int)) or hasattr(value, "ListFields") else value
        if field.message_type is not None:
            if any(_is_damaged(part) for part in values):
                return True
        elif field.type == field.TYPE_STRING:
            if any(isinstance(text, bytes) for text in values):
                return True
        elif field.name in ("elem_type", "data_type") and value not in onnx.TensorProto.DataType.values():
            return True
    return False


def _is_cut_short(content: bytes) -> bool:
    """Whether these bytes begin like an ONNX model, and one of its fields reaches beyond their end."""
    position = 0
    while position < len(content):
        tag, position = _varint(content, position)
        field, wire_type = tag >> 3, tag & 7
        if position == 2 and (field, wire_type) != (1, _VARINT):  # every writer begins with ir_version
            return False
        if wire_type == _VARINT:
            _, position = _varint(content, position)
        elif wire_type == _BYTES:
            length, position = _varint(content, position)
            position += length
        elif wire_type in (_FIXED32, _FIXED64):
            position += 4 if wire_type == _FIXED32 else 8
        else:
            return False
    return position > len(content)


def _varint(content: bytes, position: int) -> tuple[int, int]:
    """The number at a position and where it ends; beyond the end if it is not whole."""
    value = shift = 0
    while position < len(content):
        byte = content[position]
        value, shift, position = value | (byte & 127) << shift, shift + 7, position + 1
        if byte < 128:
            return value, position
    return value, len(content) + 1


# ---------------------------------------------------------------------------------------------------------------------
# Data of constants
# ---------------------------------------------------------------------------------------------------------------------


def _check_own_data(file: Path, model: Any) -> None:
    """Every constant that is in the file has as much data as its shape says."""
    for tensor in _tensors(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            continue
        name = tensor.name or "a constant"
        if tensor.HasField("raw_data"):
            size, needed = len(tensor.raw_data), _bytes_of(file, name, tensor)
            if size != needed:
                raise BadInput(f"{file}: is damaged: {name} has {size} bytes, and its shape needs {needed}")
            continue
        try:
            onnx.numpy_helper.to_array(tensor)
        except Exception as error:
            raise BadInput(f"{file}: is damaged: {name} cannot be read: {first_line(error)}") from error


def _check_external_data(file: Path, model: Any) -> None:
    folder = Path(os.path.realpath(file.parent))
    for tensor in _tensors(model):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        facts = {entry.key: entry.value for entry in tensor.external_data}
        location, name = facts.get("location", ""), tensor.name or "a constant"
        if not location:
            raise BadInput(f"{file}: the external data of {name} has no location")
        if location.startswith("*/"):
            raise BadInput(f"{file}: the data of {name} was kept in memory by the program that wrote the file, and is not in it")
        try:
            data = folder / location
            real = Path(os.path.realpath(data))
            size = real.stat().st_size if real.is_file() else None
        except (OSError, ValueError) as error:  # longer than a file name can be, or with a zero byte in it
            raise BadInput(f"{file}: the external data of {name} has the location {location!r}, which no file can have") from error
        if os.path.isabs(location) or not real.is_relative_to(folder):
            link = " (it is a link that leads there)" if data.is_symlink() else ""
            raise BadInput(f"{file}: the external data of {name}, {location!r}, lies outside the model's folder{link}; it is not read")
        if size is None:
            raise BadInput(f"{file}: the external data of {name} is missing: there is no file {location!r} beside the model")
        try:
            offset, length = int(facts.get("offset", 0)), int(facts.get("length", 0))
        except ValueError as error:
            raise BadInput(f"{file}: the external data of {name} has an offset or length that is no number") from error
        length = length or _bytes_of(file, name, tensor)  # it may be left out
        if min(offset, length) < 0 or offset + length > size:
            raise BadInput(
                f"{file}: the external data of {name} is cut short: {location!r} has {size} bytes, and {offset + length} are needed"
            )


def _bytes_of(file: Path, name: str, tensor: Any) -> int:
    """Bytes that a tensor takes in a file."""
    if tensor.data_type in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING) or min(tensor.dims, default=0) < 0:
        kind = onnx.TensorProto.DataType.Name(tensor.data_type)
        raise BadInput(f"{file}: the data of {name} cannot be {kind} of shape {list(tensor.dims)}")
    bits: int = math.prod(tensor.dims) * ir.DataType(tensor.data_type).bitwidth
    return -(-bits // 8)


def _tensors(model: Any) -> Iterator[Any]:
    for nodes in _node_lists(model):
        for node in nodes:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield attribute.t
                yield from attribute.tensors
    for graph in all_graphs(model.graph):
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)


# ---------------------------------------------------------------------------------------------------------------------
# One form for everybody
# ---------------------------------------------------------------------------------------------------------------------


def _use_one_name_of_the_domain(model: Any) -> None:
    """ONNX's own domain may be written "ai.onnx" or "". Only the latter is known everywhere."""
    for imports in (model.opset_import, *(function.opset_import for function in model.functions)):
        has_short_name = any(not entry.domain for entry in imports)
        for entry in imports:
            if entry.domain == "ai.onnx" and not has_short_name:
                entry.domain = ""
    for nodes in _node_lists(model):
        for node in nodes:
            if node.domain == "ai.onnx":
                node.domain = ""


def _node_lists(model: Any) -> Iterator[Any]:
    """The nodes of every graph and function, those of graphs in attributes included."""
    for graph in all_graphs(model.graph):
        yield graph.node
    for function in model.functions:
        yield from (graph.node for graph in all_graphs(function))


def _without_functions(file: Path, model: Any) -> Any:
    """The model with its own functions inlined, so that each call of a node in a function is a node. Nodes keep a trace of it."""
    if not model.functions:
        return model
    functions = {(function.domain, function.name): function for function in model.functions}
    for function in model.functions:
        for number, node in enumerate(function.node):
            node.name = f"{function.name}/{node.name or f'{node.op_type}_{number}'}"
    try:
        inlined = onnx.inliner.inline_local_functions(model, convert_version=True)
    except Exception as error:
        raise BadInput(f"{file}: its functions cannot be inlined: {first_line(error)}") from error
    for node in (node for nodes in _node_lists(inlined) for node in nodes):
        function = functions.get((node.domain, node.op_type))
        if function is not None:
            opsets = ", ".join(f"{entry.domain or 'ai.onnx'} {entry.version}" for entry in function.opset_import)
            raise BadInput(f"{file}: its function {node.op_type}, written for {opsets}, cannot be inlined: the model has another opset")
    return inlined
