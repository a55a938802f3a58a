"""The result of `verify` as one HTML page that needs nothing else: tables, and plots of the deviations. Needs matplotlib."""

from __future__ import annotations

import base64
import html
import io
import os
import warnings
from typing import Any

from ..bad_input import writing
from .packages import numpy
from .verify import OURS, NodeResult, Verification

try:
    import matplotlib
except ImportError as error:
    raise ImportError("--report needs matplotlib: pip install matplotlib (or the extra torch-onnx-attn[report])") from error

matplotlib.use("agg")

__all__ = ["write"]

_COLOURS = {OURS: "#1b6ca8", "onnxruntime": "#d1790f", "onnx.reference": "#5a8f29"}
_STATUS = {"agree": "#2e7d32", "known": "#b26a00", "differs": "#c62828", "refused": "#c62828", "not executed": "#666"}
_LONGEST_LABEL = 60  # letters of a node's name beside a plot
_MOST_ROWS = 400  # nodes in the overview: a png ends at 65536 pixels, and a reader before
_FLOOR, _CEILING = 1e-5, 1e6  # of what is allowed: the ends of the overview's axis
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: .5rem 0 1rem; }
td, th { border: 1px solid #ddd; padding: .25rem .6rem; text-align: left; vertical-align: top; }
th { background: #f4f4f4; }
h2 { margin-top: 2.5rem; font-size: 1.1rem; }
img { max-width: 100%; }
code { background: #f4f4f4; padding: 0 .2rem; }
.status { color: white; border-radius: .2rem; padding: .05rem .4rem; }
"""


def write(result: Verification, path: str | os.PathLike[str]) -> None:
    """Write the page. `result` should come from `verify(..., keep_errors=True)`, so that there are maps of the errors."""
    versions = ", ".join(f"{name} {version or 'not installed'}" for name, version in result.versions.items())
    values = f"the values they see, as {result.runner} computes them" if result.runner else "the values they see"
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{_text(result.model)}</title><style>{_STYLE}</style>",
        f"<h1>Attention nodes of {_text(os.path.basename(result.model))}</h1>",
        f"<p>{len(result.nodes)} nodes on {_text(values)}. This package's op ran on <code>{_text(result.device)}</code>. "
        f"Others: {_text(versions)}.</p>",
        _made_up(result),
        _image(_overview(result), f"deviations of every node, or of the {_MOST_ROWS} with the largest"),
        "<p>A deviation is the largest distance of an output from float64, divided by what rounding explains there: up to 1 is agreement. "
        "This package is held to float32 sums, the others to sums in the inputs' type, which the ONNX text allows.</p>",
        *(_node(node) for node in result.nodes),
    ]
    with writing(path), open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write("\n".join(parts))


def _made_up(result: Verification) -> str:
    if not result.made_up:
        return ""
    return f"<p>Made-up inputs: {_text(', '.join(f'{name} {kind}' for name, kind in result.made_up.items()))}.</p>"


def _node(node: NodeResult) -> str:
    status = f"<span class=status style='background:{_STATUS[node.status]}'>{_text(node.status)}</span>"
    inputs = ", ".join(f"{name} {kind}" for name, kind in node.inputs.items())
    features = f"; {', '.join(node.features)}" if node.features else ""
    runs = f"; checked at {node.executions} executions, of which the worst is shown" if node.executions > 1 else ""
    parts = [
        f"<h2>{_text(node.node)} {status}</h2><p>{_text(node.verdict)}</p>",
        f"<p>{_text(node.operator)}: {_text(inputs)}{_text(features)}{_text(runs)}</p>" if inputs else "",
    ]
    rows = [
        f"<tr><td>{_text(output.name)}<td>{_text(who)}<td>{found.absolute:.3g}<td>{found.units:.3g}<td>{found.allowed_units:.3g}"
        f"<td>{_text(str(list(found.where)) if found.where is not None else '')}<td>{_text(output.known.get(who, ''))}"
        for output in node.outputs
        for who, found in output.deviations.items()
    ]
    if rows:
        head = "<tr><th>output<th>by<th>largest distance<th>units<th>allowed<th>at<th>known defect"
        parts.append(f"<table>{head}{''.join(rows)}</table>")
    parts += [f"<p>{_text(who)} refuses: {_text(reason)}</p>" for who, reason in node.refusals.items()]
    if node.errors and node.status != "agree":
        parts.append(_image(_maps(node), f"where the outputs of {node.node} differ"))
    return "\n".join(part for part in parts if part)


def _overview(result: Verification) -> Any:
    from matplotlib.figure import Figure

    nodes = result.nodes
    if len(nodes) > _MOST_ROWS:
        nodes = tuple(sorted(nodes, key=lambda node: -node.worst)[:_MOST_ROWS])
    figure = Figure(figsize=(11, 1.4 + 0.32 * len(nodes)), layout="constrained")
    axes = figure.subplots()
    axes.axvspan(1, _CEILING, color="#c62828", alpha=0.08)
    axes.axvline(1, color="#c62828", linewidth=1)
    for who, colour in _COLOURS.items():
        worst = [
            (max((output.deviations[who].ratio for output in node.outputs if who in output.deviations), default=None), row)
            for row, node in enumerate(nodes)
        ]
        points = [(min(max(ratio, _FLOOR), _CEILING), row) for ratio, row in worst if ratio is not None]
        if points:
            across, down = zip(*points, strict=True)
            axes.scatter(across, down, color=colour, label=who, s=36, alpha=0.85)
    axes.set_xscale("log")
    axes.set_xlim(_FLOOR / 2, _CEILING * 2)
    axes.set_yticks(range(len(nodes)), [_label(node.node) for node in nodes], parse_math=False)
    axes.invert_yaxis()
    axes.set_xlabel("deviation from float64, of what rounding explains")
    axes.grid(axis="x", alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    return figure


def _maps(node: NodeResult) -> Any:
    """One picture for each output and implementation: the worst batch entry and head at each row and column."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.4 * min(len(node.errors), 3), 3.2 * -(-len(node.errors) // 3)), layout="constrained")
    grid = figure.subplots(-(-len(node.errors) // 3), min(len(node.errors), 3), squeeze=False)
    picture = None
    for axes, entry in zip(grid.flat, node.errors.items(), strict=False):
        (output, who), errors = entry
        shown = numpy.clip(errors, 1e-2, 1e2)
        picture = axes.imshow(shown, norm=LogNorm(1e-2, 1e2), cmap="RdYlGn_r", aspect="auto", interpolation="nearest")
        axes.set_title(f"{output}\n{who}", fontsize=9)
        axes.set_xlabel("column", fontsize=8)
        axes.set_ylabel("row", fontsize=8)
    for axes in grid.flat[len(node.errors) :]:
        axes.set_visible(False)
    if picture is not None:
        figure.colorbar(picture, ax=grid, label="error, of what is allowed")
    return figure


def _label(name: str) -> str:
    """The end of a long name, which is what differs."""
    return name if len(name) <= _LONGEST_LABEL else f"...{name[-_LONGEST_LABEL:]}"


def _image(figure: Any, description: str) -> str:
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that the font lacks become boxes
        figure.savefig(stream, format="png", dpi=110)
    return f"<img alt='{_text(description)}' src='data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}'>"


def _text(value: str) -> str:
    return html.escape(value, quote=True)
