"""The attention nodes of a model, wherever they are, and what can be said of one without running it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from ..bad_input import BadInput
from ..onnx.operators import INPUTS, KINDS, OUTPUTS
from .file import all_graphs
from .packages import numpy, onnx

__all__ = ["AttentionNode", "find_node", "find_nodes"]

_MICROSOFT_OPSET = 1  # of com.microsoft: there is no other
_FLOATS = ("scale", "softcap", "mask_filter_value")  # the attributes that are no whole numbers


@dataclasses.dataclass(frozen=True)
class AttentionNode:
    """One Attention, MultiHeadAttention or TensorScatter node.

    Attributes:
        name: its name in the model, or that of its first output. Unique among the nodes found.
        proto: the ``onnx.NodeProto``.
        opset: version of its domain.
        place: the subgraphs around it, from the outside, such as ``("loop_body",)``; empty in the main graph.
        constants: values of initializers and Constant nodes around it, by name. Not those of external data.
    """

    name: str
    proto: Any
    opset: int
    place: tuple[str, ...] = ()
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def op(self) -> str:
        """The op of this package: ``attention``, ``mha`` or ``tensor_scatter``."""
        return KINDS[self.proto.domain, self.proto.op_type]

    @property
    def title(self) -> str:
        """Operator and version, as people write it."""
        return f"{self.proto.domain or 'ai.onnx'}::{self.proto.op_type}-{self.opset}"

    @property
    def inputs(self) -> dict[str, str]:
        """Names of the values that go in, by ONNX's names of the inputs; absent ones left out."""
        return {formal: value for formal, value in zip(INPUTS[self.op], self.proto.input, strict=False) if value}

    @property
    def outputs(self) -> dict[str, str]:
        """Names of the values that come out, likewise."""
        return {formal: value for formal, value in zip(OUTPUTS[self.op], self.proto.output, strict=False) if value}

    @functools.cached_property
    def attributes(self) -> dict[str, Any]:
        """The attributes that are written, as Python values."""
        values = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in self.proto.attribute}
        return {name: value.decode(errors="replace") if isinstance(value, bytes) else value for name, value in values.items()}


def find_nodes(model: Any, source: object = "the model") -> list[AttentionNode]:
    """Every attention node of a model from `open_model`, those in the subgraphs of If, Loop and Scan included.

    `source` is what an error calls the model.

    Raises:
        BadInput: there is none.
    """
    if not hasattr(model, "opset_import"):
        raise BadInput(f"model: is of type {type(model).__name__}, must be what open_model returned")
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    if "ai.onnx" in opsets:
        opsets.setdefault("", opsets["ai.onnx"])
    found: list[AttentionNode] = []
    _find_in(model.graph, (), {}, opsets, found)
    if not found:
        types = [node.op_type for graph in all_graphs(model.graph) for node in graph.node]
        hint = next((kind for kind in ("GroupQueryAttention", "Softmax") if kind in types), None)
        raise BadInput(
            f"{source}: has no Attention, MultiHeadAttention or TensorScatter node among its {len(types)}"
            + (f"; it has {hint} nodes, which the command `rewrite` may turn into Attention" if hint else "")
        )
    return found


def find_node(nodes: list[AttentionNode], name: str) -> AttentionNode:
    """The node of that name (or with that output). Raises BadInput, which lists the names there are."""
    for node in nodes:
        if node.name == name or name in node.outputs.values():
            return node
    raise BadInput(f"there is no attention node {name!r}; there are {', '.join(node.name for node in nodes)}")


def _find_in(graph: Any, place: tuple[str, ...], outer: Mapping[str, Any], opsets: Mapping[str, int], found: list[AttentionNode]) -> None:
    constants = {**outer, **_constants(graph)}
    for node in graph.node:
        domain = "" if node.domain == "ai.onnx" else node.domain
        if (domain, node.op_type) in KINDS:
            proto = node
            if node.domain != domain:
                proto = onnx.NodeProto()
                proto.CopyFrom(node)
                proto.domain = domain
            _check(node, domain, opsets)
            name = node.name or next((output for output in node.output if output), node.op_type)
            taken = {other.name for other in found}
            if name in taken:
                name = next(numbered for i in range(2, len(taken) + 3) if (numbered := f"{name}#{i}") not in taken)
            found.append(AttentionNode(name, proto, opsets[domain], place, constants))
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                _find_in(inner, (*place, f"{node.name or node.op_type}.{attribute.name}"), constants, opsets, found)


def _check(node: Any, domain: str, opsets: Mapping[str, int]) -> None:
    """Raises BadInput where the node cannot mean anything."""
    name, domain_name = node.name or node.op_type, domain or "ai.onnx"
    if domain not in opsets:
        raise BadInput(f"node {name}: the model imports no opset of {domain_name}; it may be cut short")
    newest = _MICROSOFT_OPSET if domain else onnx.defs.onnx_opset_version()
    if opsets[domain] > newest:
        raise BadInput(f"node {name}: the model imports opset {opsets[domain]} of {domain_name}; the newest that is known here is {newest}")
    op = KINDS[domain, node.op_type]
    for what, given, formal in (("inputs", node.input, INPUTS[op]), ("outputs", node.output, OUTPUTS[op])):
        if len(given) > len(formal):
            raise BadInput(f"node {name}: has {len(given)} {what}; {node.op_type} has at most {len(formal)}")
    kinds = onnx.AttributeProto
    for attribute in node.attribute:
        wanted = {"mode": kinds.STRING}.get(attribute.name, kinds.FLOAT if attribute.name in _FLOATS else kinds.INT)
        if attribute.type != wanted:
            given, allowed = (kinds.AttributeType.Name(kind) for kind in (attribute.type, wanted))
            raise BadInput(f"node {name}: attribute {attribute.name} is of type {given}; it must be {allowed}")


def _constants(graph: Any) -> dict[str, Any]:
    values = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
            for attribute in node.attribute:
                if attribute.name == "value":
                    values[node.output[0]] = attribute.t
    return {name: _Lazy(tensor) for name, tensor in values.items() if tensor.data_location != onnx.TensorProto.EXTERNAL}


class _Lazy:
    """A constant that becomes an array when somebody asks."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    @functools.cached_property
    def array(self) -> Any:
        return numpy.asarray(onnx.numpy_helper.to_array(self.tensor))
