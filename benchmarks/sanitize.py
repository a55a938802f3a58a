"""The forward kernels under compute-sanitizer: memcheck and synccheck, on small shapes that reach every form of the Hopper kernel.

    python benchmarks/sanitize.py

Writes benchmarks/results/<gpu>-<date>-sanitize.json (under $OUT if that is set). Exit status 1 when a tool finds an error.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch
from machine import ROOT, describe, result_path

TOOLS = ("memcheck", "synccheck")
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")
HEAD_SIZES = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
BATCH, Q_HEADS, KV_HEADS, Q_LEN, KV_LEN = 2, 4, 2, 200, 272


def calls() -> Iterator[tuple[str, dict[str, Any]]]:
    """Arguments of attention beside Q, K and V: one call for each form of the kernel."""

    def floats(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").to(dtype)

    def bools(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, device="cuda") > 0.3

    rows = torch.arange(KV_LEN, device="cuda") < torch.tensor([[100], [KV_LEN]], device="cuda")
    lengths = torch.tensor([150, KV_LEN], device="cuda")
    yield "plain", {}
    yield "causal", {"is_causal": 1}
    yield "window", {"is_causal": 1, "left_window_size": 50}
    yield "lengths", {"nonpad_kv_seqlen": lengths, "is_causal": 1}
    yield "softcap", {"softcap": 20.0}
    yield "bool mask", {"attn_mask": bools(BATCH, 1, Q_LEN, KV_LEN)}
    yield "bool mask, unaligned", {"attn_mask": bools(BATCH, 1, Q_LEN, KV_LEN - 1)}
    yield "key padding", {"attn_mask": rows[:, None, None]}
    yield "key padding with gaps", {"attn_mask": bools(BATCH, 1, 1, KV_LEN)}
    yield "bias", {"attn_mask": floats(1, Q_HEADS, Q_LEN, KV_LEN)}
    yield "bias of a key row", {"attn_mask": floats(BATCH, 1, 1, KV_LEN)}
    yield "bias and softcap", {"attn_mask": floats(Q_LEN, KV_LEN), "softcap": 20.0}


def run_calls() -> None:
    """What the tools watch."""
    import torch_onnx_attn

    torch.manual_seed(0)
    for size, v_size in HEAD_SIZES:
        Q = torch.randn(BATCH, Q_HEADS, Q_LEN, size, device="cuda", dtype=torch.bfloat16)
        K = torch.randn(BATCH, KV_HEADS, KV_LEN, size, device="cuda", dtype=torch.bfloat16)
        V = torch.randn(BATCH, KV_HEADS, KV_LEN, v_size, device="cuda", dtype=torch.bfloat16)
        for name, arguments in calls():
            with torch_onnx_attn.kernel("forward_sm90"):
                torch.ops.onnx_attn.attention(Q, K, V, **arguments)
            torch.cuda.synchronize()
            print(f"{size}/{v_size} {name}", flush=True)


def watch(tool: str) -> dict[str, Any]:
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "5", sys.executable, __file__, "--calls"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    summary = SUMMARY.search(done.stdout)
    finished = sum(line[0].isdigit() for line in done.stdout.splitlines() if line)
    result = {"errors": int(summary.group(1)) if summary else None, "calls": finished, "exit": done.returncode}
    if result["errors"] != 0 or done.returncode:
        result["output"] = (done.stdout + done.stderr)[-4000:]
    return result


def main() -> int:
    if "--calls" in sys.argv:
        run_calls()
        return 0
    if not torch.cuda.is_available() or not shutil.which("compute-sanitizer"):
        print("sanitize.py needs a CUDA GPU and compute-sanitizer")
        return 2
    result = {**describe(), "tools": {tool: watch(tool) for tool in TOOLS}}
    path = result_path("sanitize")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 1 if any(found["errors"] != 0 or found["exit"] for found in result["tools"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
