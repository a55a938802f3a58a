"""What is installed here and whether it works: for bug reports.

It prints even where torch or the library is broken, and then says what is.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch_onnx_attn

from . import _output

_PACKAGES = ("torch", "numpy", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "transformers", "rich", "matplotlib")
_VARIABLES = ("TORCH_ONNX_ATTN_LOG", "TORCH_ONNX_ATTN_KERNEL", "TORCH_ONNX_ATTN_LIB")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def run(arguments: argparse.Namespace) -> int:
    found = _information()
    if arguments.json:
        _output.print_json(found)
    else:
        for section, facts in found.items():
            _output.write(section)
            for name, value in facts.items():
                _output.write(f"  {name:28}{value}")
    return 0 if found["torch_onnx_attn"]["works"] == "yes" else 2


def _information() -> dict[str, dict[str, Any]]:
    """Sections of facts; everything that can fail fails into its own line."""
    return {
        "torch_onnx_attn": _package(),
        "torch": _torch(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "environment": {name: os.environ.get(name, "not set") for name in _VARIABLES},
        "system": {
            "python": sys.version.split()[0],
            "executable": sys.executable,
            "platform": platform.platform(),
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        },
    }


def _package() -> dict[str, Any]:
    facts: dict[str, Any] = {"version": torch_onnx_attn.__version__, "folder": str(Path(torch_onnx_attn.__file__).parent)}
    broken = torch_onnx_attn._load_error
    if broken is not None:
        return facts | {"works": f"no: {type(broken).__name__}: {_one_line(broken)}", "library": _library_without_torch()}
    try:
        facts |= {name: value for name, value in torch_onnx_attn.build_info().items() if name not in ("version", "torch")}
        import torch

        query = torch.zeros(1, 1, 2, 8)
        torch_onnx_attn.attention(query, query, query)
    except Exception as error:
        return facts | {"works": f"no: {type(error).__name__}: {_one_line(error)}"}
    return facts | {"works": "yes"}


def _library_without_torch() -> str:
    named = os.environ.get("TORCH_ONNX_ATTN_LIB")
    files = [Path(named)] if named else sorted(Path(torch_onnx_attn.__file__).parent.glob("_C*.so"))
    return (
        ", ".join(f"{file} ({file.stat().st_size} bytes)" if file.is_file() else f"{file} (no such file)" for file in files) or "not built"
    )


def _torch() -> dict[str, Any]:
    try:
        import torch

        facts = {"version": torch.__version__, "cuda build": torch.version.cuda or "none", "threads": torch.get_num_threads()}
        available = torch.cuda.is_available()
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())] if available else []
    except Exception as error:
        return {"works": f"no: {type(error).__name__}: {_one_line(error)}"}
    names = {f"gpu {index}": f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}" for index, gpu in enumerate(devices)}
    return facts | (names or {"gpu": "none"})


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except Exception:  # not installed, or its metadata are damaged
        return "not installed"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or "no message"
