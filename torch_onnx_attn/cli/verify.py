"""Check every attention node of a model against float64, ONNX Runtime and onnx.reference.

The model runs once; each Attention, MultiHeadAttention and TensorScatter node then runs alone on the values it saw. Deviations are in
units: one unit is the rounding error of the output's type. Exit code 1: somebody differs for no known reason.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from torch_onnx_attn.bad_input import check_writable

from . import _output

if TYPE_CHECKING:
    from torch_onnx_attn.models.verify import NodeResult, OutputResult, Verification


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="an ONNX file")
    _output.add_inputs(parser)
    parser.add_argument("--node", action="append", default=[], metavar="NAME", help="check this node only; may be repeated")
    parser.add_argument("--device", default="cpu", help="where this package's op runs: cpu (default) or cuda")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        choices=("onnxruntime", "onnx.reference"),
        help="do not ask this one; onnx.reference takes long for long 16-bit sequences",
    )
    parser.add_argument("--report", metavar="FILE.html", help="write a page with plots (needs matplotlib)")
    parser.add_argument("--strict", action="store_true", help="known defects of the oracles and nodes that were not executed fail as well")


def run(arguments: argparse.Namespace) -> int:
    from torch_onnx_attn.models.oracles import ORACLES
    from torch_onnx_attn.models.verify import verify

    if arguments.report:
        from torch_onnx_attn.models import report  # so that a missing matplotlib is noticed before the work

        check_writable(arguments.report)
    device = _output.device(arguments.device)
    with _output.progress(arguments.json) as progress:
        result = verify(
            arguments.model,
            arguments.inputs,
            device=device,
            sizes=_output.dimensions(arguments.dim),
            only=arguments.node,
            oracles=[name for name in ORACLES if name not in arguments.without],
            seed=_output.seed(arguments.seed),
            keep_errors=bool(arguments.report),
            progress=progress,
        )
    failures = result.failures(arguments.strict)
    if arguments.report:
        report.write(result, arguments.report)
    if arguments.json:
        _output.print_json({**_output.plain(result), "failures": [node.node for node in failures]})
    else:
        _show(result)
        _output.say(_summary(result, failures, arguments.report))
    return 1 if failures else 0


def _show(result: Verification) -> None:
    from torch_onnx_attn.models.verify import OURS

    others = [name for name in result.versions if result.versions[name] is not None]
    rows = []
    for node in result.nodes:
        for number, output in enumerate(node.outputs or (None,)):
            first = (node.node, _output.short(node.operator), node.verdict) if number == 0 else ("", "", "")
            cells = [_cell(output, name) for name in (OURS, *others)]
            rows.append((first[0], first[1], "" if output is None else output.name, *cells, first[2]))
    _output.table(
        f"{result.model}: units of rounding error from float64, of those allowed",
        ("node", "operator", "output", OURS, *(f"{name} {result.versions[name]}" for name in others), "verdict"),
        rows,
    )
    refusals: dict[tuple[str, str], list[str]] = {}
    for node in result.nodes:
        for refusal in node.refusals.items():
            refusals.setdefault(refusal, []).append(node.node)
    for (who, reason), where in refusals.items():
        _output.say(f"{who} refuses {_output.names(where, len(result.nodes))}: {reason}")
    if result.made_up:
        _output.say(f"made-up inputs: {', '.join(f'{name} {kind}' for name, kind in result.made_up.items())}")


def _cell(output: OutputResult | None, who: str) -> str:
    found = None if output is None else output.deviations.get(who)
    return "–" if found is None else f"{_output.number(found.units)} of {_output.number(found.allowed_units)}"


def _summary(result: Verification, failures: list[NodeResult], report: str | None) -> str:
    count = len(result.nodes)
    known = sum(node.status == "known" for node in result.nodes)
    idle = sum(node.status == "not executed" for node in result.nodes)
    values = f" on the values that {result.runner} computes" if result.runner else ""
    text = f"{count} node{'s' if count != 1 else ''}{values}: "
    text += f"{len(failures)} with an unexplained deviation" if failures else "no unexplained deviation"
    text += f", {known} with a known defect of an oracle" if known else ""
    text += f", {idle} not executed" if idle else ""
    return text + (f"; report in {report}" if report else "")
