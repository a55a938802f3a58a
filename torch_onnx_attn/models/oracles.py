"""The other implementations of a node: each runs the node alone, as it stands in the model, on given arrays."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import warnings
from collections.abc import Mapping
from typing import Any

from ..onnx.operators import INPUTS
from .node import AttentionNode
from .packages import first_line, numpy, onnx
from .session import onnxruntime_session, run_session

__all__ = ["ORACLES", "Answer", "ask", "installed_version", "node_model"]

ORACLES = ("onnxruntime", "onnx.reference")


@dataclasses.dataclass(frozen=True)
class Answer:
    """What an implementation says to a node: its outputs by ONNX's names, or why it has none."""

    outputs: dict[str, Any] | None
    refusal: str | None = None


def installed_version(oracle: str) -> str | None:
    """The version of the package of an oracle; None if it is not installed."""
    try:
        return importlib.metadata.version(oracle.partition(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return None


def node_model(node: AttentionNode, arrays: Mapping[str, Any]) -> Any:
    """A model of this node only, with inputs and outputs by ONNX's names of them."""
    element = onnx.helper.np_dtype_to_tensor_dtype
    first = element(next(iter(arrays.values())).dtype)
    proto = onnx.NodeProto()
    proto.CopyFrom(node.proto)
    del proto.input[:]  # a value that goes into two inputs, such as K and V, becomes two
    proto.input.extend(formal if value else "" for formal, value in zip(INPUTS[node.op], node.proto.input, strict=False))
    by_output = {value: formal for formal, value in node.outputs.items()}
    del proto.output[:]
    proto.output.extend(by_output.get(value, "") for value in node.proto.output)
    graph = onnx.helper.make_graph(
        [proto],
        "node",
        [onnx.helper.make_tensor_value_info(name, element(array.dtype), array.shape) for name, array in arrays.items()],
        [onnx.helper.make_tensor_value_info(name, _output_type(name, first, arrays), None) for name in node.outputs],
    )
    domains = {"": node.opset} if not node.proto.domain else {"": 21, node.proto.domain: node.opset}
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in domains.items()]
    return onnx.helper.make_model(
        graph, opset_imports=imports, ir_version=onnx.helper.find_min_ir_version_for(imports, ignore_unknown=True)
    )


def _output_type(name: str, first: int, arrays: Mapping[str, Any]) -> int:
    if name == "present_value":
        value = arrays.get("V", arrays.get("value", arrays.get("past_value")))
        return first if value is None else int(onnx.helper.np_dtype_to_tensor_dtype(value.dtype))
    return first


def ask(oracle: str, node: AttentionNode, arrays: Mapping[str, Any]) -> Answer:
    """The answer of one of `ORACLES`."""
    version = installed_version(oracle)
    if version is None:
        return Answer(None, f"{oracle} is not installed")
    if oracle == "onnx.reference" and node.proto.domain:
        return Answer(None, "onnx has no com.microsoft operators")
    model = node_model(node, arrays)
    try:
        with warnings.catch_warnings(), numpy.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            if oracle == "onnxruntime":
                return Answer(run_session(onnxruntime_session(model), arrays))
            from onnx.reference import ReferenceEvaluator

            made = ReferenceEvaluator(model).run(None, dict(arrays))
            return Answer({name: numpy.asarray(array) for name, array in zip(node.outputs, made, strict=True)})
    except Exception as error:  # whatever an implementation raises is its way to refuse
        return Answer(None, first_line(error)[:300])
