"""CPU speed: ours against torch's scaled_dot_product_attention, in turns in one process, and our features against our plain call.

    python -m benchmarks.cpu [--quick] [--threads N] [--json PATH]

Times are the best of several turns: other work on the machine can only add to a time. A ratio above 1 means that ours is faster.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import torch_onnx_attn  # noqa: F401  (registers torch.ops.onnx_attn)
from benchmarks import machine

attention = torch.ops.onnx_attn.attention.default

# batch, query heads, kv heads, q_len, kv_len, head size
PREFILL = [
    (1, 8, 8, 512, 512, 64),
    (1, 8, 8, 1024, 1024, 64),
    (1, 8, 8, 2048, 2048, 64),
    (2, 16, 16, 512, 512, 64),
    (2, 16, 16, 1024, 1024, 64),
    (2, 16, 16, 2048, 2048, 64),
    (2, 16, 16, 512, 512, 128),
    (2, 16, 16, 1024, 1024, 128),
    (2, 16, 16, 2048, 2048, 128),
    (32, 12, 12, 128, 128, 64),
]
DECODE = [
    (1, 8, 8, 1, 1024, 64),
    (1, 32, 8, 1, 8192, 128),
    (4, 32, 8, 1, 4096, 128),
    (8, 16, 16, 1, 2048, 64),
]
QUICK = [(1, 8, 8, 512, 512, 64), (1, 8, 8, 1024, 1024, 64)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FEATURE_SHAPE = (1, 8, 8, 1024, 1024, 64)

Shape = tuple[int, int, int, int, int, int]
Call = Callable[[], Any]


def best_ms(calls: dict[str, Call], seconds: float) -> dict[str, float]:
    """The shortest time of each call. Turns go round the calls, until every call has had its share of `seconds`."""
    best = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()
    turns, begin = 0, time.perf_counter()
    while turns < 5 or time.perf_counter() - begin < seconds * len(calls):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], (time.perf_counter() - start) * 1e3)
        turns += 1
    return best


def make_inputs(shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, q_heads, kv_heads, q_len, kv_len, head_size = shape
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    return (
        random(batch, q_heads, q_len, head_size),
        random(batch, kv_heads, kv_len, head_size),
        random(batch, kv_heads, kv_len, head_size),
    )


def compare(shape: Shape, dtype: torch.dtype, causal: bool, seconds: float) -> dict[str, Any]:
    query, key, value = make_inputs(shape, dtype)
    grouped = shape[1] != shape[2]
    times = best_ms(
        {
            "ours": lambda: attention(query, key, value, is_causal=causal),
            "sdpa": lambda: scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=grouped),
        },
        seconds,
    )
    return {
        "shape": list(shape),
        "dtype": str(dtype).removeprefix("torch."),
        "causal": causal,
        "ours_ms": times["ours"],
        "sdpa_ms": times["sdpa"],
        "ratio": times["sdpa"] / times["ours"],
    }


def feature_calls(dtype: torch.dtype) -> dict[str, Call]:
    """The plain call first, then the same sizes with one feature each."""
    batch, heads, _, q_len, kv_len, _ = FEATURE_SHAPE
    query, key, value = make_inputs(FEATURE_SHAPE, dtype)
    keep = torch.rand(batch, heads, q_len, kv_len, generator=torch.Generator().manual_seed(1)) < 0.9
    bias = torch.randn(1, 1, q_len, kv_len).to(dtype)
    triangle = torch.ones(q_len, kv_len, dtype=torch.bool).tril()
    lengths = torch.full((batch,), kv_len * 3 // 4)
    grouped_key, grouped_value = key[:, ::4].contiguous(), value[:, ::4].contiguous()
    rows_first = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (query, key, value)]
    return {
        "plain": lambda: attention(query, key, value),
        "bool mask, per head": lambda: attention(query, key, value, keep),
        "bool mask, shared": lambda: attention(query, key, value, keep[:1, :1]),
        "bool mask, keys only": lambda: attention(query, key, value, keep[:1, :1, :1]),
        "bool mask, triangle": lambda: attention(query, key, value, triangle),
        "float mask, shared": lambda: attention(query, key, value, bias),
        "causal": lambda: attention(query, key, value, is_causal=True),
        "window of 128": lambda: attention(query, key, value, is_causal=True, left_window_size=127),
        "softcap": lambda: attention(query, key, value, softcap=20.0),
        "lengths at 3/4": lambda: attention(query, key, value, nonpad_kv_seqlen=lengths),
        "grouped heads 4:1": lambda: attention(query, grouped_key, grouped_value),
        "B,S,H,D in memory": lambda: attention(*rows_first),
        "causal, softcap, mask": lambda: attention(query, key, value, keep, is_causal=True, softcap=20.0),
    }


def print_comparison(result: dict[str, Any]) -> None:
    batch, q_heads, kv_heads, q_len, kv_len, head_size = result["shape"]
    heads = f"H{q_heads}" + (f"/{kv_heads}" if kv_heads != q_heads else "")
    shape = f"B{batch} {heads} {q_len}x{kv_len} D{head_size}" + (" causal" if result["causal"] else "")
    print(f"{shape:34} {result['dtype']:9} {result['ours_ms']:9.3f} {result['sdpa_ms']:9.3f} {result['ratio']:7.2f}", flush=True)


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two shapes only")
    parser.add_argument("--threads", type=int, help="threads of torch (default: as it is)")
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each call of a line")
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    facts = machine.describe() | {
        "cpu_name": cpu_name(),
        "threads": torch.get_num_threads(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    software = f"torch {facts['torch']} ({facts['torch_cpu_capability']}), commit {facts['commit']}"
    print(f"{facts['cpu_name']}, {facts['threads']} threads, {software}")

    print(f"{'shape':34} {'dtype':9} {'ours ms':>9} {'SDPA ms':>9} {'ratio':>7}")
    comparisons = []
    with torch.inference_mode():
        for shape in QUICK if options.quick else PREFILL + DECODE:
            for dtype in DTYPES:
                for causal in (False, True) if shape[3] > 1 else (False,):
                    comparisons.append(compare(shape, dtype, causal, options.seconds))
                    print_comparison(comparisons[-1])

        features = []
        for dtype in (torch.float32, torch.bfloat16):
            times = best_ms(feature_calls(dtype), options.seconds)
            print(f"\n{'feature, B1 H8 1024x1024 D64':34} {str(dtype).removeprefix('torch.'):9} {'ours ms':>9} {'x plain':>9}")
            for name, ms in times.items():
                relative = ms / times["plain"]
                features.append({"feature": name, "dtype": str(dtype).removeprefix("torch."), "ours_ms": ms, "relative_to_plain": relative})
                print(f"{name:34} {'':9} {ms:9.3f} {relative:9.2f}", flush=True)

    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": facts, "comparisons": comparisons, "features": features}, indent=1) + "\n")


if __name__ == "__main__":
    main()
