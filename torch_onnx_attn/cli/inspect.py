"""List the attention nodes of a model: what they use, who takes them, which kernel they would take.

Nothing is run. Symbolic dimensions of the inputs are taken as 128, and batches as 1; --dim sets others.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from . import _output

if TYPE_CHECKING:
    from torch_onnx_attn.models.inspect import NodeFacts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="an ONNX file")
    parser.add_argument("--dim", action="append", default=[], metavar="NAME=SIZE", help="size of a symbolic dimension of the inputs")
    _output.add_machine(parser)


def run(arguments: argparse.Namespace) -> int:
    from torch_onnx_attn.models.inspect import inspect

    machine = _output.machine(arguments.machine)
    with _output.progress(arguments.json) as progress:
        found = inspect(arguments.model, machine=machine, sizes=_output.dimensions(arguments.dim), progress=progress)
    if arguments.json:
        _output.print_json(found)
        return 0
    sizes = ", ".join(f"{name} {list(shape)}" for name, shape in found.sizes.items())
    count = f"{len(found.nodes)} attention node{'s' if len(found.nodes) != 1 else ''}"
    needed = "" if found.needed_opset is None else f" (these nodes need {found.needed_opset})"
    _output.say(f"{found.model}: {count}, opset {found.opset}{needed}; inputs {sizes}")
    if found.needed_opset is not None and found.needed_opset > found.opset:
        _output.say(f"the model is not valid: opset {found.opset} cannot say what its attention nodes say")
    rows = []
    for node in found.nodes:
        inputs = ", ".join(f"{name} {kind}" for name, kind in node.inputs.items())
        kernel = node.obstacle if node.plan is None else node.plan.kernel
        place = f" (in {' / '.join(node.place)})" if node.place else ""
        rows.append(
            (
                node.node + place,
                _output.short(node.operator),
                inputs,
                ", ".join(node.features) or "plain",
                str(node.needed_opset or "–"),
                kernel,
            )
        )
    _output.table("", ("node", "operator", "inputs", "features", "opset needed", f"kernel ({arguments.machine})"), rows)
    _show_refusals({node.node: node.plan.refusals for node in found.nodes if node.plan is not None})
    _show_runtimes(found.nodes)
    return 0


def _show_refusals(refusals: dict[str, dict[str, str]]) -> None:
    """Why not a faster kernel, once for all nodes with the same reason."""
    nodes: dict[tuple[str, str], list[str]] = {}
    for node, reasons in refusals.items():
        for kernel, reason in reasons.items():
            nodes.setdefault((kernel, reason), []).append(node)
    if nodes:
        rows = [(kernel, reason, _output.names(where, len(refusals))) for (kernel, reason), where in nodes.items()]
        _output.table("why not a faster kernel", ("kernel", "reason", "nodes"), rows)


def _show_runtimes(nodes: tuple[NodeFacts, ...]) -> None:
    """Who takes the nodes, once for all nodes with the same answer."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for node in nodes:
        for view in node.runtimes:
            groups.setdefault((view.runtime, view.level, "; ".join(view.reasons)), []).append(node.node)
    order = sorted(groups.items(), key=lambda entry: next(i for i, view in enumerate(nodes[0].runtimes) if view.runtime == entry[0][0]))
    _output.table("runtimes", ("runtime", "", "remarks", "nodes"), [(*group, _output.names(where, len(nodes))) for group, where in order])
