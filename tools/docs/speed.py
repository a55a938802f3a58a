"""docs/speed.md and the table in README.md, from the newest result files of benchmarks/bench.py."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.shapes import GROUPS, LINES, Line

from . import MADE

README_LINES = (
    "d128_8k", "d128_8kc", "d128_2k", "d128_2kc", "d128_512", "d128_512c", "d64_8kc", "d256_8k", "d256_8kc", "mla_192_128_4kc",
    "llama8b_gqa_8kc", "chunk_gqa_q512_k16k_c", "softcap_d128_8kc", "window1024_d128_16kc", "boolmask_B1SS_d128_2k", "bias_1HSS_d64_2k",
    "keypad_b32_s512_d64", "decode_b1_h32_8_k8192_d128@chained", "decode_b32_h32_8_k4096_d128@chained",
    "decode_log_uniform_32k@chained", "past_present_decode_b8", "bert_base_b32_s128",
)  # fmt: skip


# What the names of the peers stand for, by their first word.
PEERS = {
    "sdpa": "torch's `scaled_dot_product_attention`, on the named back end (`flash` is FlashAttention 2) or on the one that torch picks",
    "flex": "compiled FlexAttention",
    "fa4": "FlashAttention 4",
    "flashinfer": "FlashInfer",
    "ort": "ONNX Runtime on CUDA",
    "cat": "past and new rows concatenated, then SDPA on the named back end",
    "write": "new rows written into the buffer by `index_copy_`, then SDPA over the whole buffer",
    "scatter": "`Tensor.scatter_`",
    "index": "`Tensor.index_put_`",
    "eager": "matmul, mask and softmax as separate torch calls",
    "ours": "this package: the same call without the feature (`ours_plain`), or on a buffer of exactly the valid rows (`ours_exact`)",
}


LEGEND = """
A line's name says what it is about, or its head size and rows; `c` at its end: causal. `@graph`: replays of a CUDA graph of one call, from
a cold L2 cache. In `ms`, `us` and `bytes` less is better; memory below 1 MiB counts as 1 MiB in the ratio.

| peer, by its first word | what it is |
|---|---|"""


def figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}" if value < 1e5 else f"{value:,.0f}"


def best_peer(record: dict[str, Any]) -> str:
    values = {name: value for name, value in record["peers"].items() if value is not None}
    if not values:
        return "–"
    less_is_better = record["unit"] in ("ms", "us", "bytes")
    name = (min if less_is_better else max)(values, key=lambda peer: values[peer])
    return f"{figure(values[name])} ({name})"


def shape(line: Line) -> str:
    heads = str(line.q_heads) if line.q_heads == line.kv_heads else f"{line.q_heads}/{line.kv_heads}"
    rows = str(line.q_len) if line.q_len == line.kv_len else f"{line.q_len} on {line.kv_len}"
    size = str(line.head_size) if line.head_size == line.v_size else f"{line.head_size}/{line.v_size}"
    return f"{line.batch}, {heads}, {rows}, {size}{' causal' if line.causal else ''} {line.dtype}"


SHAPES = {line.name: shape(line) for line in LINES}


def row(record: dict[str, Any]) -> str:
    ours, ratio, share = figure(record["ours"]), record["ratio"], record["ceiling_fraction"]
    cells = (
        record["name"],
        SHAPES.get(record["name"].split("@")[0], ""),
        f"{f'**{ours}**' if ratio is not None and ratio < 1 else ours} {record['unit']}",
        best_peer(record),
        "–" if ratio is None else f"{ratio:.2f}",
        "–" if share is None else f"{share:.2f}",
    )
    return f"| {' | '.join(cells)} |"


HEAD = ["| line | batch, heads, rows, head size | ours | best peer of the run | ratio | of the ceiling |", "|---|---|---|---|---|---|"]


@dataclass(frozen=True)
class Run:
    """A result file, and the groups of lines that the documentation takes from it: those that no newer file has."""

    path: Path
    result: dict[str, Any]
    groups: tuple[str, ...]

    @property
    def records(self) -> list[dict[str, Any]]:
        return [record for record in self.result["lines"] if record["group"] in self.groups]


def newest_runs(paths: list[Path]) -> list[Run]:
    """Newest first, by the date in the name."""
    taken: set[str] = set()
    runs = []
    for path in sorted(paths, reverse=True):
        result = json.loads(path.read_text())
        groups = tuple(dict.fromkeys(record["group"] for record in result["lines"] if record["group"] not in taken))
        taken.update(groups)
        if groups:
            runs.append(Run(path, result, groups))
    return runs


def peers(runs: list[Run], measured: bool) -> dict[str, str]:
    """The peers that the runs have figures of, or have none of: name, the same for all back ends, and what it stands for."""
    records = [record for run in runs for record in run.records]
    names = {name for record in records for name, value in record["peers"].items() if value is not None}
    listed = {name for record in records for name in record["peers"] if (name in names) == measured}
    return {first: meaning for first, meaning in PEERS.items() if any(name.split("_")[0] == first for name in listed)}


def origin(run: Run, is_only: bool) -> str:
    result = run.result
    groups = "" if is_only else f"{', '.join(run.groups)}: "
    return (
        f"{groups}{result['gpu']}, driver {result['driver']}, torch {result['torch']}, CUDA {result['cuda']}, {result['date']}, commit "
        f"{result['commit']},\n`benchmarks/results/{run.path.name}`, made by `python benchmarks/bench.py"
        f"{' --quick' if result['quick'] else ''}`.\n"
    )


def source(runs: list[Run]) -> str:
    absent = ", ".join(peers(runs, measured=False).values())
    return (
        "\n".join(origin(run, len(runs) == 1) for run in runs) + f"\nEvery peer was timed by the same method in the same run and checked "
        f"against float64 first. Ratio: above 1 we are faster; bold: we are not.\nNot compared: FlashAttention 3, "
        f"which the benchmark has no peer for{f'; not installed there: {absent}' if absent else ''}.\n"
        f"`sdpa_*` is torch's SDPA on that back end. `@chained`: replays of a CUDA graph of many calls. The result files have every line, "
        f"lost ones included.\n"
    )


def readme_table(runs: list[Run]) -> str:
    records = {record["name"]: record for run in runs for record in run.records}
    return "\n".join([source(runs), *HEAD, *(row(records[name]) for name in README_LINES if name in records)]) + "\n"


def page(runs: list[Run]) -> str:
    lines = ["# Speed", MADE + "\n", source(runs), LEGEND.strip("\n")]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in peers(runs, measured=True).items()]
    for group in GROUPS:
        for run in (run for run in runs if group in run.groups):
            ceilings = ", ".join(f"{name} {figure(value)}" for name, value in run.result["ceilings"].items())
            records = [record for record in run.records if record["group"] == group]
            lines += [f"\n## {group}\n", f"{run.result['date']}, commit {run.result['commit']}. Ceilings of the run: {ceilings}.\n"]
            lines += [*HEAD, *(row(record) for record in records)]
            image = run.path.with_name(f"{run.path.stem}-{group}.png")
            if image.exists():
                lines.append(f"\n![{group}](results/{image.name})")
    return "\n".join(lines) + "\n"
