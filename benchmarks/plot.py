"""Bar charts of a result file: one PNG for each group, ours beside the peers. `python benchmarks/plot.py results/x.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# A name has the same colour in every picture.
COLORS = {
    "ours": "#c0392b", "ours_plain": "#e6b0aa", "ours_exact": "#935116",
    "sdpa": "#16a085", "sdpa_flash": "#34495e", "sdpa_cudnn": "#7f8c8d", "sdpa_efficient": "#2980b9", "sdpa_math": "#8e44ad",
    "flex": "#d35400", "fa4": "#f39c12", "flashinfer": "#27ae60", "ort": "#2c82c9",
    "cat_sdpa": "#16a085", "cat_cudnn": "#a6acaf", "write_flash": "#5d6d7e", "write_cudnn": "#bfc9ca",
    "index_put": "#af7ac5", "scatter": "#5499c7", "eager_scores": "#8e44ad",
}  # fmt: skip
OTHERS = "#bdc3c7"


def draw(path: Path) -> list[Path]:
    """Write `<stem>-<group>.png` beside the JSON file, and return the paths. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    result = json.loads(path.read_text())
    written = []
    for group in dict.fromkeys(record["group"] for record in result["lines"]):
        records = [record for record in result["lines"] if record["group"] == group and record["ours"] is not None]
        if records:
            target = path.with_name(f"{path.stem}-{group}.png")
            _draw_group(target, f"{group}: {result['gpu']}, torch {result['torch']}, {result['date']}", records)
            written.append(target)
    return written


def _draw_group(target: Path, title: str, records: list[dict[str, Any]]) -> None:
    from matplotlib import pyplot

    units = list(dict.fromkeys(record["unit"] for record in records))
    by_unit = [[record for record in records if record["unit"] == unit] for unit in units]
    heights = [1.0 + sum(_bars(record) for record in part) * 0.2 for part in by_unit]
    figure, panels = pyplot.subplots(
        len(units), 1, figsize=(10, sum(heights) + 0.6), height_ratios=heights, squeeze=False, layout="constrained"
    )
    colors = _colors(records)
    for panel, unit, part in zip(panels[:, 0], units, by_unit, strict=True):
        _draw_panel(panel, part, colors)
        panel.set_xlabel(f"{unit} ({'less' if unit in ('ms', 'us', 'bytes') else 'more'} is better)")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
    figure.legend(handles, colors, loc="outside lower center", ncols=min(6, len(colors)), frameon=False)
    figure.suptitle(title)
    figure.savefig(target, dpi=110)
    pyplot.close(figure)


def _bars(record: dict[str, Any]) -> int:
    return 2 + sum(value is not None for value in record["peers"].values())


def _colors(records: list[dict[str, Any]]) -> dict[str, str]:
    names = dict.fromkeys(name for record in records for name, value in record["peers"].items() if value is not None)
    return {name: COLORS.get(name, OTHERS) for name in ("ours", *names)}


def _draw_panel(panel: Any, records: list[dict[str, Any]], colors: dict[str, str]) -> None:
    """Horizontal bars, top to bottom in the order of the records, with the value at the end of each bar."""
    y, ticks = 0.0, []
    for record in records:
        bars = {"ours": record["ours"], **{name: value for name, value in record["peers"].items() if value is not None}}
        ticks.append(y - (len(bars) - 1) / 2)
        for name, value in bars.items():
            panel.barh(y, value, color=colors[name], height=0.85)
            panel.annotate(f"{value:.4g}", (value, y), xytext=(3, 0), textcoords="offset points", va="center", fontsize=6)
            y -= 1
        y -= 1
    panel.set_yticks(ticks, [record["name"] for record in records], fontsize=8)
    panel.margins(x=0.08, y=0.01)
    panel.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        for image in draw(Path(argument)):
            print(image)
