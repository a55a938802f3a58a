"""Results: one record for each line and method, the JSON file, and the table that shows what we lose first."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import accounting, machine
from benchmarks.accounting import LESS_IS_BETTER
from benchmarks.shapes import Line
from benchmarks.timing import METHODS

Record = dict[str, Any]
LIBRARIES = ("triton", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "flash-attn-4", "flashinfer-python", "onnxruntime-gpu", "onnxruntime")


def make_record(
    line: Line,
    method: str,
    measured: dict[str, float],
    refused: dict[str, str],
    errors: dict[str, float],
    ceilings: dict[str, float],
) -> Record:
    """`measured`: milliseconds (or bytes) of "ours" and the peers; `refused`: why a peer has none; `errors`: against float64."""
    values = {name: accounting.value(line, ms) for name, ms in measured.items()}
    ours = values.pop("ours", None)
    peers: dict[str, float | None] = {name: values.get(name) for name in (*values, *refused) if name != "ours"}
    ratio, best = accounting.ratio_to_best(line.unit, ours, peers)
    fraction = accounting.ceiling_fraction(line, measured["ours"], ceilings) if "ours" in measured and line.ceiling else None
    return {
        "name": line.name if method == line.methods[0] else f"{line.name}@{method}",
        "group": line.group,
        "ours": ours,
        "unit": line.unit,
        "method": METHODS[method],
        "peers": peers,
        "ratio": ratio,
        "ceiling_fraction": fraction,
        "best_peer": best,
        "ceiling": line.ceiling or None,
        "goals": goals(line, method),
        "measured_ms": measured if line.unit != "bytes" else None,
        "relative_errors": errors,
        "refused": {name: reason for name, reason in refused.items() if name != "ours"},
        "error": refused.get("ours"),
    }


def failed_record(line: Line, message: str, peers: Sequence[str]) -> Record:
    """A line without a result of ours."""
    return make_record(line, line.methods[0], {}, {"ours": message, **dict.fromkeys(peers, "not run: ours failed")}, {}, {})


def goals(line: Line, method: str) -> dict[str, float]:
    """What the design asks of the line. More than a tie, and fractions of bandwidth, are asked of the last of its methods."""
    last = method == line.methods[-1]
    asked = {"ratio": line.goal_ratio if last else min(1.0, line.goal_ratio)}
    if line.goal_ceiling and last:
        asked["ceiling_fraction"] = line.goal_ceiling
    if line.goal_value:
        asked["value"] = line.goal_value
    return asked


def is_loss(record: Record) -> bool:
    """No result, or slower than a peer (than the goal, where the goal allows for some loss)."""
    if record["error"] is not None:
        return True
    return record["ratio"] is not None and record["ratio"] < min(1.0, record["goals"]["ratio"])


def misses_goal(record: Record) -> bool:
    asked = record["goals"]
    if record["error"] is not None or record["ours"] is None:
        return True
    return (
        (record["ratio"] is not None and record["ratio"] < asked["ratio"])
        or (record["ceiling_fraction"] or 1.0) < asked.get("ceiling_fraction", 0.0)
        or ("value" in asked and record["ours"] > asked["value"])
    )


def table_order(records: Sequence[Record]) -> list[Record]:
    """Losses first, the worst at the top; then missed goals; then the rest, each in the order of the list."""

    def key(record: Record) -> tuple[int, float]:
        if is_loss(record):
            return 0, record["ratio"] or 0.0
        return (1 if misses_goal(record) else 2), 0.0

    return sorted(records, key=key)


def table(records: Sequence[Record]) -> str:
    """The table as text. Marks: LOSS slower than the best peer, goal: below what the design asks, FAIL: no result."""
    rows = [("", "line", "ours", "unit", "best peer", "ratio", "ceiling", "other peers (- refuses)")]
    for record in table_order(records):
        mark = "FAIL" if record["error"] else "LOSS" if is_loss(record) else "goal" if misses_goal(record) else ""
        best = record["best_peer"]
        others = [f"{name} {_number(value)}" for name, value in record["peers"].items() if name != best]
        rows.append(
            (
                mark,
                record["name"],
                _number(record["ours"]),
                record["unit"],
                f"{best} {_number(record['peers'][best])}" if best else "-",
                f"{record['ratio']:.2f}" if record["ratio"] is not None else "-",
                f"{record['ceiling_fraction']:.0%} {record['ceiling']}" if record["ceiling_fraction"] is not None else "-",
                record["error"] or ", ".join(others),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(7)]
    return "\n".join(_align(row, widths) for row in rows)


def _align(row: tuple[str, ...], widths: list[int]) -> str:
    numbers = (2, 5)
    cells = [cell.rjust(width) if i in numbers else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=False))]
    return "  ".join([*cells, row[-1]]).rstrip()


def progress(record: Record) -> str:
    if record["error"]:
        return f"{record['name']}: {record['error']}"
    ratio = f", {record['ratio']:.2f} x {record['best_peer']}" if record["best_peer"] else ""
    return f"{record['name']}: {_number(record['ours'])} {record['unit']}{ratio}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= 1e6:
        return f"{value / 1e6:.1f}M"
    return f"{value:.0f}" if value >= 100 else f"{value:.4g}" if value >= 1 else f"{value:.4f}"


def summary(records: Sequence[Record]) -> str:
    failed = sum(1 for record in records if record["error"])
    lost = sum(1 for record in records if is_loss(record)) - failed
    missed = sum(1 for record in records if misses_goal(record) and not is_loss(record))
    units = sorted({record["unit"] for record in records if record["unit"] in LESS_IS_BETTER})
    note = f" Less is better for {', '.join(units)}." if units else ""
    return f"{len(records)} results: {lost} lost to a peer, {missed} below the design's goal, {failed} failed.{note}"


def header(device: str, quick: bool) -> dict[str, Any]:
    """Where and when: everything of the JSON file but ceilings and lines."""
    facts = machine.describe()
    libraries = {name: _version(name) for name in LIBRARIES}
    return {**facts, "gpu": facts["gpu"] if device == "cuda" else "cpu", "quick": quick, "libraries": libraries}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def default_path(head: dict[str, Any]) -> Path:
    """benchmarks/results/nvidia-h200-2026-12-24.json, or under $OUT where a machine collects its results."""
    folder = Path(os.environ["OUT"]) if os.environ.get("OUT") else machine.RESULTS
    return folder / f"{head['gpu'].lower().replace(' ', '-')}-{head['date']}.json"


def write_json(path: Path, head: dict[str, Any], ceilings: dict[str, float], records: Sequence[Record]) -> None:
    """The whole file at once, so that a run which is cut short leaves a readable file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    text = json.dumps({**head, "ceilings": ceilings, "lines": list(records)}, allow_nan=False)
    rounded = json.loads(text, parse_float=lambda digits: float(f"{float(digits):.6g}"))
    part.write_text(json.dumps(rounded, indent=1) + "\n")
    os.replace(part, path)
