"""The kernels under compute-sanitizer: memcheck and synccheck, on small shapes that reach every form of those with tensor cores.

    python benchmarks/sanitize.py

Writes benchmarks/results/<gpu>-<date>-sanitize.json (under $OUT if that is set). Exit status 1 when a tool finds an error.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from machine import ROOT, describe, result_path

TOOLS = ("memcheck", "synccheck")
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")
BATCH, Q_HEADS, KV_HEADS = 2, 4, 2


@dataclass(frozen=True)
class Watched:
    """A kernel, and the shapes at which it is watched."""

    kernel: str
    q_lens: tuple[int, ...]
    kv_len: int
    head_sizes: tuple[tuple[int, int], ...]  # of Q and K, and of V
    refused: tuple[str, ...] = ()  # features that it does not have


QUERY_MASKS = ("bool mask", "bool mask, unaligned", "bias", "bias and softcap")
WATCHED = (
    Watched("forward_sm90", (200,), 272, ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))),
    Watched("forward_sm80", (200,), 272, ((64, 64), (128, 128), (256, 256))),
    Watched("forward_short", (100,), 120, ((32, 32), (64, 64), (128, 128)), (*QUERY_MASKS, "softcap")),
    Watched("forward_short", (200,), 250, ((64, 64),), (*QUERY_MASKS, "softcap")),
    Watched("decode", (1, 5), 5000, ((64, 64), (128, 128), (256, 256))),  # several chunks of keys, and blocks that share them
)


def random(device: str, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device).to(torch.bfloat16)


def features(watched: Watched, q_len: int, device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Arguments of attention beside Q, K and V: one call for each form of the kernels."""

    def bools(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, device=device) > 0.3

    kv_len = watched.kv_len
    some = torch.tensor([[kv_len // 3], [kv_len]], device=device)
    yield "plain", {}
    yield "causal", {"is_causal": 1}
    yield "window", {"is_causal": 1, "left_window_size": 50}
    yield "lengths", {"nonpad_kv_seqlen": some[:, 0], "is_causal": 1}
    yield "softcap", {"softcap": 20.0}
    yield "key padding", {"attn_mask": (torch.arange(kv_len, device=device) < some)[:, None, None]}
    yield "key padding with gaps", {"attn_mask": bools(BATCH, 1, 1, kv_len)}
    yield "bias of a key row", {"attn_mask": random(device, BATCH, 1, 1, kv_len)}
    yield "bool mask", {"attn_mask": bools(BATCH, 1, q_len, kv_len)}
    yield "bool mask, unaligned", {"attn_mask": bools(BATCH, 1, q_len, kv_len - 1)}
    yield "bias", {"attn_mask": random(device, 1, Q_HEADS, q_len, kv_len)}
    yield "bias and softcap", {"attn_mask": random(device, q_len, kv_len), "softcap": 20.0}


def calls(device: str = "cuda") -> Iterator[tuple[str | None, str, functools.partial[Any]]]:
    """(kernel to force, what it is, the call)."""
    attention = torch.ops.onnx_attn.attention
    for watched in WATCHED:
        for (size, v_size), q_len in itertools.product(watched.head_sizes, watched.q_lens):
            Q = random(device, BATCH, Q_HEADS, q_len, size)
            K, V = (random(device, BATCH, KV_HEADS, watched.kv_len, width) for width in (size, v_size))
            for name, arguments in features(watched, q_len, device):
                if name in watched.refused:
                    continue
                yield watched.kernel, f"{q_len} rows, {size}/{v_size}, {name}", functools.partial(attention, Q, K, V, **arguments)
    for head_size in (64, 128, 256):
        Q, K, V = (random(device, BATCH, heads, 1, head_size) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
        caches = [random(device, BATCH, KV_HEADS, 5000, head_size) for _ in "KV"]
        lengths = torch.tensor([1700, 4999], device=device)
        past = {"past_key": caches[0], "past_value": caches[1]}
        yield "decode", f"{head_size}, cached", functools.partial(torch.ops.onnx_attn.attention_cached, Q, K, V, *caches, lengths)
        yield "decode", f"{head_size}, past and present", functools.partial(attention.kv, Q, K, V, **past)
    for head_size, mode in itertools.product((64, 128, 256), range(4)):
        Q = random(device, BATCH, Q_HEADS, 300, head_size)
        K, V = (random(device, BATCH, KV_HEADS, 400, head_size) for _ in "KV")
        scores = functools.partial(attention.qk, Q, K, V, qk_matmul_output_mode=mode, is_causal=mode % 2)
        yield None, f"{head_size}, scores of mode {mode}", scores


def run_calls() -> None:
    """What the tools watch."""
    import torch_onnx_attn

    torch.manual_seed(0)
    for kernel, name, call in calls():
        with torch_onnx_attn.kernel(kernel):
            call()
        torch.cuda.synchronize()
        print(f"call: {kernel or 'scores'}, {name}", flush=True)


def watch(tool: str) -> dict[str, Any]:
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "5", sys.executable, __file__, "--calls"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    summary = SUMMARY.search(done.stdout)
    finished = sum(line.startswith("call: ") for line in done.stdout.splitlines())
    result: dict[str, Any] = {"errors": int(summary.group(1)) if summary else None, "calls": finished, "exit": done.returncode}
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
