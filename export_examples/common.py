"""What the examples share: running the exported file, comparing and timing the ways to run a model, and the verdict."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a checkout works without being installed

import torch

OUT = Path(__file__).resolve().parent.parent / "out"


def set_up() -> None:
    """Repeatable numbers, and a screen without the exporter's remarks on packages that are not there."""
    torch.manual_seed(0)
    warnings.filterwarnings("ignore")
    for name in ("torch.onnx._internal.exporter._registration", "torch.onnx"):
        logging.getLogger(name).setLevel(logging.ERROR)
    OUT.mkdir(exist_ok=True)


def compiled(model: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], str]:
    """torch.compile(model), and what compiled it: inductor needs a C++ compiler, and its absence is said, not hidden."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return torch.compile(model, backend="aot_eager", **options), "torch.compile, aot_eager (no C++ compiler here for inductor)"
    return torch.compile(model, **options), "torch.compile, inductor"


class OnnxModel:
    """An exported file in ONNX Runtime on the CPU, or in onnx.reference where the runtime refuses the model."""

    def __init__(self, path: Path) -> None:
        import onnx
        import onnxruntime

        self.path, self.model = path, onnx.load(path)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = torch.get_num_threads()
        try:
            session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            self.label = f"ONNX Runtime {onnxruntime.__version__}"
        except Exception as reason:
            from onnx.reference import ReferenceEvaluator

            session = ReferenceEvaluator(self.model)
            self.label = f"onnx.reference {onnx.__version__}"
            print(f"ONNX Runtime {onnxruntime.__version__} refuses this file, so onnx.reference runs it: {' '.join(str(reason).split())}\n")
        self.session = session
        self.inputs = [value.name for value in self.model.graph.input]

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        feeds = {name: tensor.numpy() for name, tensor in zip(self.inputs, tensors, strict=True)}
        return [torch.from_numpy(array) for array in self.session.run(None, feeds)]

    def count(self) -> Counter[str]:
        """How many nodes there are of each type, MultiHeadAttention and Attention under their own names."""
        return Counter(node.op_type for node in self.model.graph.node)

    def describe(self) -> str:
        """The number of nodes, and one line for each attention or cache node: what went in and came out, and its attributes."""
        import onnx

        here = Path.cwd()
        path = self.path.relative_to(here) if self.path.is_relative_to(here) else self.path
        lines = [f"The file {path}: {self.count().total()} nodes, among them"]
        for node in self.model.graph.node:
            if node.op_type in ("Attention", "MultiHeadAttention", "TensorScatter"):
                attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
                shown = ", ".join(f"{name}={round(value, 6) if isinstance(value, float) else value}" for name, value in attributes.items())
                lines.append(f"  {node.op_type}({', '.join(node.input)}) -> {', '.join(node.output)}  [{shown}]")
        return "\n".join(dict.fromkeys(lines))


def best_ms(call: Callable[[], Any], repeats: int = 5) -> float:
    """The shortest of a few runs, in milliseconds."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest absolute difference; infinite if the shapes differ or something is not a number."""
    if a.shape != b.shape:
        return float("inf")
    gap = (a.double() - b.double()).abs().max().item()
    return gap if gap == gap else float("inf")


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their longest entry."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, ["-" * width for width in widths], *rows]:
        print("  " + "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


class Comparison:
    """Ways to run a model: how far the result of each is from the wanted one, and how long it takes."""

    def __init__(self, want: torch.Tensor, tolerance: float, parts: int = 1) -> None:
        """parts: how many equal parts a run has, where the time of one is to be shown."""
        self.want, self.tolerance, self.parts = want, tolerance, parts
        self.gaps: dict[str, float] = {}
        self.rows: list[list[str]] = []

    def time(self, label: str, run: Callable[..., Any], *inputs: Any) -> None:
        """A way that is not compared, because the wanted result came from it."""
        self.rows.append([label, "-", f"{best_ms(lambda: run(*inputs)) / self.parts:.2f}"])

    def run(self, label: str, run: Callable[..., torch.Tensor], *inputs: Any) -> torch.Tensor:
        result = run(*inputs)
        self.gaps[label] = difference(result, self.want)
        self.time(label, run, *inputs)
        self.rows[-1][1] = f"{self.gaps[label]:.1e}"
        return result

    def show(self, of_what: str, part: str = "run") -> None:
        print_table(["what ran", f"largest difference of {of_what}", f"ms per {part}"], self.rows)

    def judge(self, verdict: Verdict, claim: str) -> None:
        """What each way that was compared has to hold: "label: claim (within tolerance)"."""
        for label, gap in self.gaps.items():
            verdict.require(gap < self.tolerance, f"{label}: {claim} (within {self.tolerance:.0e})")


class Verdict:
    """Collects what must hold, prints it, and ends the program: exit status 0 if all of it did, 1 otherwise."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def require(self, holds: bool, claim: str) -> None:
        print(f"  {'ok  ' if holds else 'FAIL'} {claim}")
        if not holds:
            self.failures.append(claim)

    def finish(self) -> None:
        print(f"\n{'All checks hold.' if not self.failures else f'{len(self.failures)} checks FAILED.'}")
        sys.exit(1 if self.failures else 0)
