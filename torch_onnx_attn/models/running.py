"""Runs a whole model once and keeps what its attention nodes see."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

from ..bad_input import BadInput
from ..onnx.operators import INPUTS, KINDS, OUTPUTS
from .arrays import to_array
from .behaviours import closest, crash
from .facts import facts_of_kinds
from .file import all_graphs, with_weights
from .node import AttentionNode, find_nodes
from .node_call import call_of
from .packages import first_line, numpy, onnx
from .session import onnxruntime_session, run_session

__all__ = ["MOST_EXECUTIONS", "Observed", "Seen", "observe"]

MOST_EXECUTIONS = 16  # of a node in a loop, that are kept

Seen = dict[str, list[dict[str, Any]]]  # node name -> for each execution, arrays by ONNX's names of the inputs


@dataclasses.dataclass(frozen=True)
class Observed:
    """What nodes saw. A node that was not executed is absent from `seen`.

    Attributes:
        seen: the arrays.
        runner: who ran the model; "" where the nodes see the model's inputs only.
        obstacle: why nodes in subgraphs could not be observed, if so.
    """

    seen: Seen
    runner: str
    obstacle: str = ""


def observe(model: Any, nodes: list[AttentionNode], feeds: Mapping[str, Any], folder: str | os.PathLike[str]) -> Observed:
    """What each node sees when the model runs with these arrays.

    ONNX Runtime runs the model without optimisations, with the nodes' inputs as extra outputs. Where it is not installed or does not
    take the model, and for nodes inside If, Loop and Scan, whose values cannot be had from it, onnx.reference runs it, with this
    package's ops for the attention nodes.

    Raises:
        BadInput: neither can run the model.
    """
    reasons = []
    inner = [node for node in nodes if node.place]
    if len(inner) < len(nodes):
        try:
            seen, runner = _by_onnxruntime(model, [node for node in nodes if not node.place], feeds, folder)
        except Exception as error:
            reasons.append(f"ONNX Runtime: {_reason(error)}")
        else:
            if not inner:
                return Observed(seen, runner)
            try:
                seen |= _by_reference(model, inner, feeds, folder)
            except Exception as error:
                return Observed(seen, runner, f"nodes in subgraphs need onnx.reference, which cannot run the model: {_reason(error)}")
            return Observed(seen, " and ".join(filter(None, (runner, "onnx.reference"))))
    try:
        return Observed(_by_reference(model, nodes, feeds, folder), "onnx.reference")
    except Exception as error:
        reasons.append(f"onnx.reference: {_reason(error)}")
    shapes = ", ".join(f"{name} {list(numpy.shape(array))}" for name, array in feeds.items())
    raise BadInput(f"the model does not run with inputs {shapes}; {'; '.join(reasons)}")


def _reason(error: Exception) -> str:
    """An error in a sentence or two; ONNX Runtime's begin with codes and may quote whole nodes."""
    text = first_line(error)
    return text if len(text) < 400 else text[:400] + "..."


def _by_onnxruntime(model: Any, nodes: list[AttentionNode], feeds: Mapping[str, Any], folder: str | os.PathLike[str]) -> tuple[Seen, str]:
    import onnxruntime

    exposed = onnx.ModelProto()
    exposed.CopyFrom(model)
    values = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer if not tensor.external_data}
    values |= feeds
    wanted = {name for node in nodes for name in node.inputs.values() if name not in values}
    del exposed.graph.output[:]
    exposed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in sorted(wanted))
    for node in nodes:
        reason = crash(closest("onnxruntime", onnxruntime.__version__), facts_of_kinds(node, {}))
        if reason is not None:
            raise RuntimeError(f"not asked: {reason} ({node.name})")
    if wanted:
        session = onnxruntime_session(exposed, folder)
        taken = {value.name for value in session.get_inputs()}
        values |= run_session(session, {name: array for name, array in feeds.items() if name in taken})
    seen = {node.name: [{formal: values[name] for formal, name in node.inputs.items()}] for node in nodes}
    return seen, "ONNX Runtime" if wanted else ""


# ---------------------------------------------------------------------------------------------------------------------
# onnx.reference
# ---------------------------------------------------------------------------------------------------------------------


def _by_reference(model: Any, nodes: list[AttentionNode], feeds: Mapping[str, Any], folder: str | os.PathLike[str]) -> Seen:
    from onnx.reference import ReferenceEvaluator

    held = with_weights(model, folder)
    everybody = {node.name: node for node in find_nodes(held)}
    for node in everybody.values():
        node.proto.name = node.name  # which makes names unique; those of values are not, in branches beside each other
    watched = {node.name for node in nodes}
    seen: Seen = {}

    def run(proto: Any, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        node = everybody[proto.name]
        arguments = {formal: array for formal, array in zip(INPUTS[node.op], arrays, strict=False) if array is not None}
        executions = seen.setdefault(node.name, [])
        if node.name in watched and len(executions) < MOST_EXECUTIONS:
            executions.append({formal: numpy.array(array) for formal, array in arguments.items()})
        made = call_of(node, arguments).run()
        return tuple(to_array(made[formal]) if name else None for formal, name in zip(OUTPUTS[node.op], proto.output, strict=False))

    _name_loop_conditions(held)
    evaluator = ReferenceEvaluator(held, new_ops=[_operator(*kind, run) for kind in KINDS])
    with numpy.errstate(all="ignore"):
        evaluator.run(None, dict(feeds))
    return {name: executions for name, executions in seen.items() if executions}


def _name_loop_conditions(model: Any) -> None:
    """onnx.reference (1.23) runs a Loop without a condition not at all; by the text it runs until its count."""
    name = "always_true"
    loops = [node for graph in all_graphs(model.graph) for node in graph.node if node.op_type == "Loop" and not node.domain]
    for node in loops:
        if len(node.input) > 1 and not node.input[1]:
            node.input[1] = name
    if any(name in node.input for node in loops):
        model.graph.initializer.append(onnx.numpy_helper.from_array(numpy.array(True), name))


def _operator(domain: str, op_type: str, run: Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]) -> Any:
    """An operator for ReferenceEvaluator, which looks up the class by its name."""
    from onnx.reference.op_run import OpRun

    def _run(self: Any, *arrays: Any, **attributes: Any) -> tuple[Any, ...]:
        return run(self.onnx_node, arrays)

    return type(op_type, (OpRun,), {"op_domain": domain, "_run": _run})
