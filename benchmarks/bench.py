"""Our ops beside every other attention that runs on this machine: speed, host cost, memory; checked against float64 first.

    python benchmarks/bench.py                        everything, a table and benchmarks/results/<gpu>-<date>.json
    python benchmarks/bench.py --quick --groups decode,cache
    python benchmarks/bench.py --lines 'd128_8k|bert' --peers 'sdpa|fa4'
    python benchmarks/bench.py --list

Losing lines come first in the table. The exit code is 1 when a line of ours failed, 2 when nothing could be run.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # `benchmarks` and an in-place build of torch_onnx_attn

from benchmarks import ceilings, check, plot, report
from benchmarks.candidates import Candidate, ours
from benchmarks.inputs import Inputs, make_inputs
from benchmarks.peers import BUILDERS
from benchmarks.report import Record
from benchmarks.shapes import GROUPS, LINES, Line
from benchmarks.timing import FULL, QUICK, Timer, explain

SHORT_MS = 0.05  # eager times below this get graph replays beside them


def main(argv: Sequence[str] | None = None, lines: Sequence[Line] = LINES) -> int:
    options = parse(argv)
    chosen = choose(lines, options.lines, options.groups)
    if options.list:
        for line in chosen:
            print(f"{line.group:8} {line.name:34} {', '.join(line.methods):16} {' '.join(line.peers)}")
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print("bench.py needs a CUDA GPU, and torch sees none here. `bench.py --list` shows the lines; benchmarks/cpu.py times the CPU.")
        return 2
    if not chosen:
        print("No line matches --lines and --groups; `bench.py --list` shows all of them.")
        return 2
    head = report.header(options.device, options.quick)
    path = options.json or report.default_path(head)
    timer = Timer(options.device, QUICK if options.quick else FULL)
    found = ceilings.measure(timer, 10 if options.quick else 30)
    print(f"{head['gpu']}, torch {head['torch']}; " + ", ".join(f"{name} {value:.0f}" for name, value in found.items()), flush=True)
    records = run(chosen, options.peers, timer, found, lambda so_far: report.write_json(path, head, found, so_far))
    print(f"\n{report.table(records)}\n\n{report.summary(records)}\n{path}")
    if not options.no_plots:
        draw(path)
    return 1 if any(record["error"] for record in records) else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", metavar="REGEX", type=re.compile, default=re.compile(""), help="only lines whose name matches")
    parser.add_argument("--groups", metavar="A,B", default=",".join(GROUPS), help=f"among {', '.join(GROUPS)}")
    parser.add_argument("--peers", metavar="REGEX|none", default="", help="only peers whose name matches; none: ours alone")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--json", metavar="PATH", type=Path, help="default: benchmarks/results/<gpu>-<date>.json")
    parser.add_argument("--list", action="store_true", help="name the lines and stop")
    parser.add_argument("--no-plots", action="store_true", help="write no PNG files beside the JSON file")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)  # tests run the harness itself on small CPU lines
    options = parser.parse_args(argv)
    unknown = set(options.groups.split(",")) - set(GROUPS)
    if unknown:
        parser.error(f"--groups: {', '.join(sorted(unknown))} not among {', '.join(GROUPS)}")
    return options


def choose(lines: Sequence[Line], pattern: re.Pattern[str], groups: str) -> list[Line]:
    return [line for line in lines if line.group in groups.split(",") and pattern.search(line.name)]


def chosen_peers(line: Line, pattern: str) -> list[str]:
    """Our own calls that a line is relative to are no peers, and always stay."""
    return [name for name in line.peers if name.startswith("ours_") or (pattern != "none" and re.search(pattern, name))]


def run(chosen: Sequence[Line], pattern: str, timer: Timer, found: dict[str, float], save: Callable[[list[Record]], None]) -> list[Record]:
    """Every line in turn. One that fails leaves a record with its error, and the next one runs."""
    records: list[Record] = []
    lost = None  # the line that took the CUDA context with it
    for number, line in enumerate(chosen, 1):
        begin = time.perf_counter()
        names = chosen_peers(line, pattern)
        try:
            if lost:
                raise RuntimeError(f"not run: the CUDA context was lost in line {lost}")
            made = run_line(line, names, timer, found)
        except Exception as error:
            made = [report.failed_record(line, explain(error), names)]
            lost = lost or (None if context_is_alive(timer) else line.name)
        records += made
        save(records)
        if timer.cuda and not lost:
            torch.cuda.empty_cache()
        for record in made:
            print(f"[{number}/{len(chosen)}] {report.progress(record)}  ({time.perf_counter() - begin:.1f} s)", flush=True)
    return records


def run_line(line: Line, names: Sequence[str], timer: Timer, found: dict[str, float]) -> list[Record]:
    sets = make_inputs(line, timer.device)
    candidates, refused = [ours(line, sets)], {}
    for name in names:
        try:
            candidates.append(BUILDERS[name](line, sets))
        except Exception as error:
            refused[name] = explain(error)
    errors, wrong = verify(line, sets, candidates, timer)
    if "ours" in wrong:
        raise RuntimeError(wrong["ours"])
    refused |= wrong
    candidates = [candidate for candidate in candidates if candidate.name not in wrong]

    records = []
    methods = list(line.methods)
    for method in methods:  # grows by "graph" when the eager times are short
        measured, failures = timer.measure(candidates, method)
        records.append(report.make_record(line, method, measured, {**refused, **failures}, errors, found))
        if methods == ["events"] and min(measured.values(), default=1.0) < SHORT_MS:
            methods.append("graph")
    return records


def verify(line: Line, sets: list[Inputs], candidates: list[Candidate], timer: Timer) -> tuple[dict[str, float], dict[str, str]]:
    """The relative error of each candidate on the first and last input set, and what is wrong with those that are."""
    errors: dict[str, float] = {}
    wrong: dict[str, str] = {}
    for candidate in candidates:
        if candidate.name.startswith("ours_"):
            continue  # another question than the line's; ours answers for it
        limit = check.TOLERANCE[line.dtype] * (1 if candidate.name == "ours" else check.PEER_FACTOR)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                error = max(one_error(line, sets[which], candidate, which, timer) for which in {0, len(sets) - 1})
            except Exception as fault:
                wrong[candidate.name] = explain(fault, [str(warning.message) for warning in told])
                continue
        if error > limit:
            wrong[candidate.name] = f"wrong result: relative error {error:.2g}, limit {limit:.2g}"
        if math.isfinite(error):
            errors[candidate.name] = error
    return errors, wrong


def one_error(line: Line, inputs: Inputs, candidate: Candidate, which: int, timer: Timer) -> float:
    check.poison(line, timer.device)
    inputs.forget_writes()
    if candidate.own_stream:
        timer.synchronize()
    with candidate.context():
        result = candidate.calls[which]()
    return check.relative_error(line, inputs, candidate.unpack(result))


def context_is_alive(timer: Timer) -> bool:
    try:
        timer.synchronize()
    except RuntimeError:
        return False
    return True


def draw(path: Path) -> None:
    try:
        for image in plot.draw(path):
            print(image)
    except ImportError:
        print("No plots: matplotlib is not installed.")


if __name__ == "__main__":
    raise SystemExit(main())
