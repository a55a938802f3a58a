"""The ceilings of this machine, measured in the same run as everything else: copy, read, matrix products."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import Timer, explain

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

COPY_BYTES = 1 << 30
READ_BLOCK = 16384
MATMUL = 8192

if triton is not None:

    @triton.jit
    def _read_kernel(x, sums, BLOCK: tl.constexpr):
        """One block of x, added up: nothing but a read."""
        block = tl.program_id(0).to(tl.int64)
        tl.store(sums + block, tl.sum(tl.load(x + block * BLOCK + tl.arange(0, BLOCK))))


def _median_ms(timer: Timer, call: Callable[[], Any], count: int) -> float:
    timer.events(call, 3, flush=False)
    return statistics.median(timer.events(call, count, flush=False))


def _read_gbs(timer: Timer, x: Tensor, count: int) -> float:
    """The better of torch's sum and a plain Triton loop over the same bytes."""
    best = x.nbytes / _median_ms(timer, x.sum, count) / 1e6
    if triton is None:
        return best
    blocks = x.numel() // READ_BLOCK
    sums = torch.empty(blocks, device=x.device)
    kernel = _read_kernel[(blocks,)]
    try:
        plain = _median_ms(timer, lambda: kernel(x, sums, BLOCK=READ_BLOCK, num_warps=8), count)
    except Exception as error:  # no C compiler, say
        print(f"The read ceiling is torch's sum alone: {explain(error)}")
        return best
    return max(best, x.nbytes / plain / 1e6)


def measure(timer: Timer, count: int) -> dict[str, float]:
    """copy_gbs (bytes read and written), read_gbs, and the rate of an 8192 x 8192 x 8192 product for each type."""
    if not timer.cuda:
        return {}
    source = torch.empty(COPY_BYTES, dtype=torch.int8, device="cuda").random_(-100, 100)
    target = torch.empty_like(source)
    found = {"copy_gbs": 2 * COPY_BYTES / _median_ms(timer, partial(target.copy_, source), count) / 1e6}
    del source, target
    found["read_gbs"] = _read_gbs(timer, torch.randn(COPY_BYTES // 2, device="cuda"), count)

    allowed = torch.backends.cuda.matmul.allow_tf32
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32), ("tf32", torch.float32)):
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        a, b = (torch.randn(MATMUL, MATMUL, device="cuda", dtype=dtype) for _ in range(2))
        ms = _median_ms(timer, partial(torch.matmul, a, b), count)
        found[f"matmul_{name}_tflops"] = 2 * MATMUL**3 / ms / 1e9
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.cuda.empty_cache()
    return found
