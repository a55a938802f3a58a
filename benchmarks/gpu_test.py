"""The test suite on CUDA and a few figures, as one result file. Needs a GPU, pytest and onnx; no network.

    python benchmarks/gpu_test.py [pytest arguments]

Writes benchmarks/results/<gpu>-<date>-gpu-test.json (under $OUT if that is set). Exit status 1 when a test fails. With
TORCH_ONNX_ATTN_KERNEL, which forces or forbids kernels, the file says so in its name.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import sys
import time
from typing import Any

import pytest
import torch
from machine import ROOT, describe, result_path

import torch_onnx_attn


class Outcome:
    """A pytest plugin that counts what happened and keeps the names of failures."""

    def __init__(self) -> None:
        self.counts = {"passed": 0, "failed": 0, "skipped": 0, "xfailed": 0}
        self.failures: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome == "failed" or (report.when == "setup" and report.outcome == "skipped"):
            outcome = "xfailed" if hasattr(report, "wasxfail") and report.outcome == "skipped" else report.outcome
            self.counts[outcome] += 1
            if outcome == "failed":
                self.failures.append(report.nodeid)


def run_tests(arguments: list[str]) -> dict[str, Any]:
    outcome = Outcome()
    parallel = ["-n", "6"] if importlib.util.find_spec("xdist") else []
    start = time.perf_counter()
    pytest.main(["-q", "--device", "cuda", *parallel, *arguments, str(ROOT / "tests")], plugins=[outcome])
    return {**outcome.counts, "seconds": round(time.perf_counter() - start, 1), "failures": outcome.failures}


def median_milliseconds(call: Any, repeats: int = 20) -> float:
    """Median time of one call by events."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def general_kernel_tflops() -> float:
    """fp16, batch 8, 16 heads, 2048 tokens, head size 128."""
    Q, K, V = (torch.randn(8, 16, 2048, 128, device="cuda", dtype=torch.float16) for _ in range(3))
    milliseconds = median_milliseconds(lambda: torch.ops.onnx_attn.attention.default(Q, K, V))
    return 4 * 8 * 16 * 2048 * 2048 * 128 / milliseconds / 1e9


def host_microseconds(calls: int = 2000) -> dict[str, float]:
    """Host time of one eager call through the named overload, the GPU never waited for."""
    Q = torch.randn(1, 1, 1, 64, device="cuda", dtype=torch.float16)
    op = torch.ops.onnx_attn.attention.default
    times = {}
    for name, mode in (("no_grad", torch.no_grad), ("inference_mode", torch.inference_mode)):
        with mode():
            rounds = []
            for _ in range(5):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(calls // 5):
                    op(Q, Q, Q)
                rounds.append((time.perf_counter() - start) / (calls // 5) * 1e6)
            times[name] = round(min(rounds), 2)
    return times


def kind_of_result() -> str:
    """gpu-test, and the kernels that are forced or forbidden: gpu-test-without-decode."""
    names = [name for name in os.environ.get("TORCH_ONNX_ATTN_KERNEL", "").split(",") if name]
    return "-".join(["gpu-test", *(f"without-{name[1:]}" if name.startswith("-") else name for name in names)])


def main() -> int:
    if not torch.cuda.is_available():
        print("gpu_test.py needs a CUDA GPU; `make test` runs the same suite on the CPU")
        return 2
    result = {**describe(), "build": {key: value for key, value in torch_onnx_attn.build_info().items() if key != "library"}}
    result["tests"] = run_tests(sys.argv[1:])
    result["figures"] = {
        "fp16 8,16,2048,128 TFLOP/s": round(general_kernel_tflops(), 2),
        "host microseconds per call": host_microseconds(),
    }
    path = result_path(kind_of_result())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    print(f"written to {path.name}")
    return 1 if result["tests"]["failed"] or not result["tests"]["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
