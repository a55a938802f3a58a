"""From a node and the arrays it sees to a call of this package's op, and the callable that does it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..bad_input import BadInput
from ..call import Call
from ..onnx.operators import INPUTS
from .arrays import to_tensor
from .file import open_model
from .node import AttentionNode, find_node, find_nodes

__all__ = ["Node", "call_of", "load_node"]


def _causal(value: int) -> bool:
    if value not in (0, 1):
        raise BadInput(f"is_causal is {value}; ONNX gives a meaning to 0 and 1 only")
    return value == 1


def _on_for_one(value: int) -> bool:
    """As ONNX Runtime, which defines the operator, reads it."""
    return value == 1


_ATTRIBUTES: dict[str, dict[str, Any]] = {
    "attention": {
        "is_causal": _causal,
        "kv_num_heads": int,
        "q_num_heads": int,
        "scale": float,
        "softcap": float,
        "softmax_precision": int,
        "left_window_size": int,
        "right_window_size": int,
    },
    "mha": {"num_heads": int, "mask_filter_value": float, "scale": float, "unidirectional": _on_for_one},
    "tensor_scatter": {"axis": int},
}


def call_of(node: AttentionNode, arrays: Mapping[str, Any]) -> Call:
    """The call that a node stands for, on the CPU.

    Args:
        node: a node from `find_nodes`.
        arrays: numpy arrays or tensors by ONNX's names of the node's inputs.

    Raises:
        BadInput: an attribute or type that the op of this package does not have, or a required attribute that is missing.
    """
    tensors = {name: value if isinstance(value, Tensor) else to_tensor(name, value) for name, value in arrays.items()}
    given = dict(node.attributes)
    attributes: dict[str, Any] = {}
    if node.op == "tensor_scatter":
        mode = given.pop("mode", "linear")
        if mode not in ("linear", "circular"):
            raise BadInput(f"node {node.name}: mode is {mode!r}; it must be linear or circular")
        attributes["circular"] = mode == "circular"
    if node.op == "attention":
        mode = given.pop("qk_matmul_output_mode", 0)
        if "qk_matmul_output" in node.outputs:
            attributes["qk_matmul_output_mode"] = mode
    for name, value in given.items():
        if name not in _ATTRIBUTES[node.op]:
            raise BadInput(f"node {node.name}: {node.title} has no attribute {name}")
        attributes[name] = _ATTRIBUTES[node.op][name](value)
    if node.op == "mha" and "num_heads" not in attributes:
        raise BadInput(f"node {node.name}: num_heads is missing")
    missing = [name for name in INPUTS[node.op][: {"attention": 3, "mha": 1, "tensor_scatter": 2}[node.op]] if name not in tensors]
    if missing:
        raise BadInput(f"node {node.name}: {missing[0]} is missing")
    if not node.outputs:
        raise BadInput(f"node {node.name}: has no output")
    return Call(node.op, tensors, attributes, tuple(node.outputs))


class Node:
    """One node of a model as a function of tensors, by this package's kernels on the tensors' device.

    Attributes:
        name: the node's name in the model.
        operator: such as ``ai.onnx::Attention-24``.
        inputs: ONNX's names of the inputs that are wired, in ONNX's order.
        outputs: likewise.
    """

    def __init__(self, node: AttentionNode) -> None:
        self.node = node
        self.name, self.operator = node.name, node.title
        self.inputs, self.outputs = tuple(node.inputs), tuple(node.outputs)

    def call(self, *tensors: Tensor, **named: Tensor) -> Call:
        """The call as data: its float64 result, its plan."""
        given = dict(zip(self.inputs, tensors, strict=False)) | named
        if len(tensors) > len(self.inputs) or set(named) - set(self.inputs):
            unknown = sorted(set(named) - set(self.inputs))
            what = f"{unknown[0]}: is no input of the node" if unknown else f"{len(tensors)} tensors were given"
            raise TypeError(f"{what}; its inputs are {', '.join(self.inputs)}")
        for name in self.inputs:
            if name not in given:
                constant = self.node.constants.get(self.node.inputs[name])
                if constant is None:
                    raise TypeError(f"{name}: is missing; the node's inputs are {', '.join(self.inputs)}")
                given[name] = to_tensor(name, constant.array).to(next(iter(given.values())).device if given else "cpu")
        return call_of(self.node, given)

    def __call__(self, *tensors: Tensor, **named: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Runs the node. Tensors by position in the order of `inputs`, or by name; constants of the model may be left out.

        Returns:
            The node's outputs in the order of `outputs`; the tensor itself when there is one.

        Raises:
            TypeError: an input is missing or unknown.
            RuntimeError: as the op raises it, naming the argument.
        """
        made = tuple(self.call(*tensors, **named).run().values())
        return made[0] if len(made) == 1 else made

    def __repr__(self) -> str:
        return f"<{self.operator} {self.name!r}: {', '.join(self.inputs)} -> {', '.join(self.outputs)}>"


def load_node(model: str | os.PathLike[str] | Any, name: str) -> Node:
    """A callable for one attention node of an ONNX model.

    Args:
        model: path of a model file, or an ``onnx.ModelProto``.
        name: the node's name, or the name of one of its outputs.

    Raises:
        BadInput: the file cannot be used, or has no such node.
    """
    if isinstance(model, (str, os.PathLike)):
        return Node(find_node(find_nodes(open_model(model), model), name))
    return Node(find_node(find_nodes(model), name))
