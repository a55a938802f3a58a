"""docs/speed.md and the table in README.md, from a result file of benchmarks/bench.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.shapes import LINES, Line

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


def peers(result: dict[str, Any], measured: bool) -> dict[str, str]:
    """The peers that the run has figures of, or those that it has none of: name, the same for all back ends, and what it stands for."""
    names = {name for record in result["lines"] for name, value in record["peers"].items() if value is not None}
    listed = {name for record in result["lines"] for name in record["peers"] if (name in names) == measured}
    return {first: meaning for first, meaning in PEERS.items() if any(name.split("_")[0] == first for name in listed)}


def source(path: Path, result: dict[str, Any]) -> str:
    absent = ", ".join(peers(result, measured=False).values())
    return (
        f"{result['gpu']}, driver {result['driver']}, torch {result['torch']}, CUDA {result['cuda']}, {result['date']}, commit "
        f"{result['commit']}.\nEvery peer was timed by the same method in the same run and checked against float64 first. Ratio: above 1 "
        f"we are faster; bold: we are not.\nNot compared: FlashAttention 3, "
        f"which the benchmark has no peer for{f'; not installed there: {absent}' if absent else ''}.\n"
        f"`sdpa_*` is torch's SDPA on that back end. `@chained`: replays of a CUDA graph of many calls. The whole output, lost lines "
        f"included:\n`benchmarks/results/{path.name}`, made by `python benchmarks/bench.py{' --quick' if result['quick'] else ''}`.\n"
    )


def readme_table(path: Path, result: dict[str, Any]) -> str:
    records = {record["name"]: record for record in result["lines"]}
    return "\n".join([source(path, result), *HEAD, *(row(records[name]) for name in README_LINES if name in records)]) + "\n"


def page(path: Path, result: dict[str, Any]) -> str:
    ceilings = ", ".join(f"{name} {figure(value)}" for name, value in result["ceilings"].items())
    lines = ["# Speed", MADE + "\n", source(path, result), f"Ceilings measured in the same run: {ceilings}.", LEGEND]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in peers(result, measured=True).items()]
    for group in dict.fromkeys(record["group"] for record in result["lines"]):
        lines += [f"\n## {group}\n", *HEAD, *(row(record) for record in result["lines"] if record["group"] == group)]
        image = path.with_name(f"{path.stem}-{group}.png")
        if image.exists():
            lines.append(f"\n![{group}](results/{image.name})")
    return "\n".join(lines) + "\n"
