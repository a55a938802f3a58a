"""What a result file says of the machine, the software and the commit that produced it."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def _output_of(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


def commit() -> str:
    """The commit that is checked out, or TORCH_ONNX_ATTN_COMMIT where the files travel without their history."""
    named = os.environ.get("TORCH_ONNX_ATTN_COMMIT")
    if named:
        return named
    found = _output_of("git", "rev-parse", "--short", "HEAD")
    if found is None:
        return "unknown"
    return found + ("+changes" if _output_of("git", "status", "--porcelain", "--untracked-files=no") else "")


def describe() -> dict[str, Any]:
    """{gpu, driver, torch, cuda, date, commit, python, cpu}; gpu and driver are None without a GPU."""
    has_gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
        "driver": _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if has_gpu else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "python": platform.python_version(),
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads",
    }


def result_path(kind: str) -> Path:
    """benchmarks/results/<gpu or cpu>-<date>-<kind>.json, or under $OUT where a machine collects its results."""
    facts = describe()
    name = (facts["gpu"] or "cpu").lower().replace(" ", "-")
    folder = Path(os.environ["OUT"]) if os.environ.get("OUT") else RESULTS
    return folder / f"{name}-{facts['date']}-{kind}.json"
