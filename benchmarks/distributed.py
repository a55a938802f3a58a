"""Two GPUs against one, in one run: heads-sharded prefill, context parallel by each method, decode with a split cache, and the links.

    python benchmarks/distributed.py              # two GPUs, NCCL: the checks of tests/distributed_*.py first, then the figures
    python benchmarks/distributed.py --device cpu # two gloo processes on tiny sizes, to try the program

It starts its own processes. Figures of one GPU are taken on the first while the second is idle, except "copies", which both hold.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

if __name__ == "__main__":
    ROOT = Path(__file__).resolve().parent.parent
    sys.path[:1] = [str(ROOT), str(ROOT / "tests")]  # `benchmarks`, an in-place build, and the checks; the processes inherit it

from distributed_world import Ranks, World

from benchmarks import machine
from benchmarks.timing import capture

RANKS = 2
ROUNDS = 3


@dataclass(frozen=True)
class Sizes:
    """Everything of the run that a dry run makes smaller."""

    q_heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    prefill: tuple[int, ...] = (8192, 16384, 32768, 65536, 131072)
    caches: tuple[int, ...] = (1 << 16, 1 << 18, 1 << 20)
    link_bytes: tuple[int, ...] = (1 << 20, 16 << 20, 256 << 20)
    block_ms: float = 60.0  # device time of one sample
    chain: int = 8  # decode steps in a graph


TINY = Sizes(8, 4, 16, (64, 128), (512, 1024), (1 << 12, 1 << 16), 1.0, 2)


@dataclass(frozen=True)
class Line:
    name: str
    one_ms: float  # one GPU, or each of two copies
    two_ms: float  # both together, the slower rank
    ratio: float  # of linear: 1 is twice the speed of one GPU, or the summed bandwidth of two copies
    goal: float | None = None
    facts: dict[str, float] | None = None


# ---------------------------------------------------------------------------------------------------------------------
# In each process


class Clock:
    def __init__(self, ranks: Ranks, block_ms: float) -> None:
        self.ranks, self.block_ms = ranks, block_ms
        self.cuda = ranks.device == "cuda"

    def together(self, call: Callable[[], Any]) -> float:
        """Milliseconds per call while every rank calls it; the slowest rank's."""
        return self._slowest(self._median(call, everywhere=True))

    def alone(self, call: Callable[[], Any]) -> float:
        """Milliseconds per call on the first rank, the others idle; every rank is told."""
        mine = self._median(call, everywhere=False) if self.ranks.rank == 0 else 0.0
        return self._slowest(mine)

    def _median(self, call: Callable[[], Any], everywhere: bool) -> float:
        for _ in range(2):
            call()
        once = self._sample(call, 1, everywhere)
        count = max(1, min(100, int(self.block_ms / max(once, 1e-3))))
        count = int(self._slowest(float(count))) if everywhere else count
        return statistics.median(self._sample(call, count, everywhere) for _ in range(ROUNDS))

    def _sample(self, call: Callable[[], Any], count: int, everywhere: bool) -> float:
        if everywhere:
            dist.barrier()
        self._wait()
        if not self.cuda:
            begin = time.perf_counter()
            for _ in range(count):
                call()
            return (time.perf_counter() - begin) * 1e3 / count
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(count):
            call()
        last.record()
        self._wait()
        return first.elapsed_time(last) / count

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def _slowest(self, value: float) -> float:
        held = torch.tensor([value], device=self.ranks.device, dtype=torch.float64)
        dist.all_reduce(held, dist.ReduceOp.MAX)
        return float(held)


def _normal(ranks: Ranks, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=ranks.device, dtype=torch.bfloat16)


def measure_prefill(ranks: Ranks, sizes: Sizes) -> list[Line]:
    """Causal prefill of one sequence: heads over the ranks through DTensors, then rows over the ranks by each method."""
    from torch.distributed.tensor import DTensor, Shard

    from torch_onnx_attn.distributed import context_parallel_attention

    clock, mesh, lines = Clock(ranks, sizes.block_ms), ranks.mesh(), []
    op = torch.ops.onnx_attn.attention.default
    for rows in sizes.prefill:
        whole = [_normal(ranks, 1, heads, rows, sizes.head_size) for heads in (sizes.q_heads, sizes.kv_heads, sizes.kv_heads)]
        one = clock.alone(lambda whole=whole: op(*whole, is_causal=True))
        heads = [DTensor.from_local(x.chunk(RANKS, 1)[ranks.rank].contiguous(), mesh, [Shard(1)], run_check=False) for x in whole]
        two = clock.together(lambda heads=heads: op(*heads, is_causal=True))
        lines.append(Line(f"prefill_heads_{rows}", one, two, one / (RANKS * two), 0.95))
        mine = [x.chunk(RANKS, 2)[ranks.rank].contiguous() for x in whole]
        for method, order in (("ring", "zigzag"), ("allgather", "zigzag"), ("ulysses", "contiguous"), ("ring", "contiguous")):
            options = {"mesh": mesh, "method": method, "order": order, "is_causal": True}
            two = clock.together(lambda mine=mine, options=options: context_parallel_attention(*mine, **options))
            goal = 0.85 if (method, order, rows) == ("ring", "zigzag", max(sizes.prefill)) else None
            lines.append(Line(f"prefill_{method}_{order}_{rows}", one, two, one / (RANKS * two), goal))
    return lines


def measure_decode(ranks: Ranks, sizes: Sizes) -> list[Line]:
    """One new token of one sequence whose cache is nearly full: two copies of the cache, then one cache over both ranks."""
    return [_decode_line(ranks, sizes, rows) for rows in sizes.caches]


def _decode_line(ranks: Ranks, sizes: Sizes, cache_rows: int) -> Line:
    from torch_onnx_attn.distributed import context_parallel_cached

    clock, mesh = Clock(ranks, sizes.block_ms), ranks.mesh()
    Q, K, V = (_normal(ranks, 1, heads, 1, sizes.head_size) for heads in (sizes.q_heads, sizes.kv_heads, sizes.kv_heads))
    used = torch.full((1,), cache_rows - 64, dtype=torch.int64, device=ranks.device)
    read = 2 * sizes.kv_heads * (cache_rows - 63) * sizes.head_size * 2  # bytes of K and V

    def caches(rows: int) -> list[list[torch.Tensor]]:
        """One for each call of the chain, as far as that makes sure that none is still in the L2 cache."""
        count = min(sizes.chain, max(1, (1 << 29) // (read // cache_rows * rows)))
        return [[_normal(ranks, 1, sizes.kv_heads, rows, sizes.head_size) for _ in range(2)] for _ in range(count)]

    def chained(call: Callable[..., Any], held: list[list[torch.Tensor]]) -> float:
        calls = [partial(call, *held[turn % len(held)]) for turn in range(sizes.chain)]
        run = capture(calls) if ranks.device == "cuda" else lambda: [call() for call in calls]
        return clock.together(run) / sizes.chain

    copies, parts = caches(cache_rows), caches(cache_rows // RANKS)
    one = chained(lambda keys, values: torch.ops.onnx_attn.attention_cached(Q, K, V, keys, values, used), copies)
    two = chained(lambda keys, values: context_parallel_cached(Q, K, V, keys, values, used, mesh=mesh), parts)
    half, lse = used // RANKS, torch.ops.onnx_attn.attention.lse
    alone = chained(lambda keys, values: lse(Q, keys, values, nonpad_kv_seqlen=half, return_lse=True), parts)
    facts = {"copies_summed_gbs": RANKS * read / one / 1e6, "split_summed_gbs": read / two / 1e6, "part_alone_ms": alone}
    goal = 0.85 if cache_rows == max(sizes.caches) else None
    return Line(f"decode_cache_{cache_rows}", one, two, one / (RANKS * two), goal, facts)


def measure_host(ranks: Ranks, sizes: Sizes) -> dict[str, float]:
    """Host time of an eager call on tiny tensors, in µs: through DTensors, and on a plain tensor."""
    from torch.distributed.tensor import DTensor, Shard

    Q = _normal(ranks, 1, 4, 16, 64)
    sharded = DTensor.from_local(Q, ranks.mesh(), [Shard(1)], run_check=False)
    found = {}
    with torch.no_grad():
        for name, tensor in (("host_us_dtensor", sharded), ("host_us_plain", Q)):
            times = []
            for _ in range(20):
                begin = time.perf_counter()
                for _ in range(50):
                    torch.ops.onnx_attn.attention.default(tensor, tensor, tensor)
                times.append((time.perf_counter() - begin) * 1e6 / 50)
                if ranks.device == "cuda":
                    torch.cuda.synchronize()
            found[name] = statistics.median(times)
    return found


def measure_links(ranks: Ranks, sizes: Sizes) -> dict[str, float]:
    """For each pattern and size: bytes that a rank sends to the other, over the time. "step" is what a decoding step gathers, in µs."""
    from torch_onnx_attn.distributed.sequence import all_gather

    clock, other, group = Clock(ranks, sizes.block_ms), 1 - ranks.rank, ranks.mesh().get_group()
    found = {}

    def exchange(sent: torch.Tensor, received: torch.Tensor) -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)]):
            work.wait()

    def buffers(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sent = torch.zeros(count, dtype=torch.uint8, device=ranks.device)
        return sent, torch.empty_like(sent), sent.new_empty(RANKS * count)

    for count in sizes.link_bytes:
        sent, received, gathered = buffers(count)
        found[f"exchange_{count}_gbs"] = count / 1e6 / clock.together(partial(exchange, sent, received))
        found[f"all_gather_{count}_gbs"] = count / 1e6 / clock.together(partial(all_gather, gathered, sent, group))
        found[f"all_to_all_{count}_gbs"] = count / RANKS / 1e6 / clock.together(partial(dist.all_to_all_single, received, sent))
    sent, _, gathered = buffers(sizes.q_heads * (sizes.head_size + 1) * 4)
    step = partial(all_gather, gathered, sent, group)
    found["step_us"] = 1e3 * clock.together(step)
    if ranks.device == "cuda":
        found["step_in_a_graph_us"] = 1e3 * clock.together(capture([step] * 16)) / 16
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Checks over NCCL


def checks() -> list[tuple[str, str, tuple[Any, ...]]]:
    """(module, function, arguments) of what two ranks must pass before anything is timed."""
    from cases import Case
    from distributed_cases import DECODING, METHODS, ROWS, Rows
    from test_distributed_dtensor import ATTENTION, CHECKS, MHA

    large = Case(dtype=torch.bfloat16, batch=1, q_heads=8, kv_heads=2, q_len=1024, kv_len=1024, head_size=128)
    shapes = (
        replace(large, is_causal=True),
        replace(large, is_causal=True, left_window_size=300, softcap=20.0),
        replace(large, batch=2, lengths="full", is_causal=True),
        replace(large, dtype=torch.float16, mask="bool", mask_axes="qk"),
    )
    found: list[tuple[str, str, tuple[Any, ...]]] = [("distributed_cases", "check_rows", (rows,)) for rows in ROWS if rows.ranks == RANKS]
    for case in shapes:
        found += [("distributed_cases", "check_rows", (Rows(case, m, o),)) for m in METHODS for o in ("contiguous", "zigzag")]
    found += [("distributed_cases", "check_decoding", (given,)) for given in DECODING]
    found += [(CHECKS, "check_attention", (RANKS, case, way)) for case in ATTENTION.values() for way in ("batch", "heads")]
    found += [(CHECKS, "check_mha", (RANKS, case, way)) for case in MHA.values() for way in ("batch", "heads")]
    found += [(CHECKS, "check_cached", (RANKS, way, 4)) for way in ("batch", "heads")]
    found += [(CHECKS, "check_tensor_parallel", (RANKS, "attention", local, False)) for local in (False, True)]
    found += [(CHECKS, "check_fsdp", ("attention", False)), (CHECKS, "check_moved", (RANKS,))]
    return found


def graph_checks() -> list[tuple[str, str, tuple[Any, ...]]]:
    """The same in CUDA graphs; after the figures, since a capture that NCCL refuses can leave its group unusable."""
    from cases import Case
    from distributed_cases import DECODING, METHODS

    wide = Case(dtype=torch.bfloat16, batch=1, q_heads=16, kv_heads=4, q_len=1, kv_len=1, head_size=128)
    captured = [replace(given, capture=True) for given in DECODING[:8]]
    captured.append(replace(DECODING[0], case=wide, lengths=(4100,), capacity=8192, block_size=64, capture=True))
    found: list[tuple[str, str, tuple[Any, ...]]] = [("distributed_cases", "check_decoding", (given,)) for given in captured]
    return found + [("distributed_cases", "check_rows_in_a_graph", (method,)) for method in METHODS]


def run_checks(pair: World, listed: list[tuple[str, str, tuple[Any, ...]]]) -> dict[str, Any]:
    """How many were run, and what failed. A rank that does not answer ends the list: nothing could be trusted after it."""
    failed: dict[str, str] = {}
    for count, (module, function, arguments) in enumerate(listed, 1):
        answers = pair.results(module, function, *arguments, timeout_s=60)
        wrong = [answer.failure for answer in answers if answer.failure]
        if wrong:
            failed[f"{function} {', '.join(map(str, arguments))}"] = wrong[0].strip().splitlines()[-1][:300]
            print("FAIL", function, *arguments, wrong[0], flush=True)
        if not all(answer.given for answer in answers):
            return {"run": count, "left_out": len(listed) - count, "failed": failed}
    return {"run": len(listed), "failed": failed}


def run_faults(timeout_s: float = 8.0) -> dict[str, Any]:
    """What the waiting rank sees when the other raises: how torch handles it by default, and with blocking waits."""
    found = {}
    for name, setting in (("default", "0"), ("TORCH_NCCL_BLOCKING_WAIT=1", "1")):
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = setting
        pair = World(RANKS, "cuda", timeout_s)
        begin = time.monotonic()
        waiting, raising = pair.results("distributed_faults", "bad_argument_on_cuda", "ring", timeout_s=60)
        seconds = time.monotonic() - begin
        pair.stop()
        found[name] = {
            "group_timeout_s": timeout_s,
            "seconds": seconds,
            "waiting_rank": (waiting.failure or waiting.value)[:300],
            "raising_rank": (raising.failure or raising.value)[:300],
        }
    return found


# ---------------------------------------------------------------------------------------------------------------------
# The program


def result_path() -> Path:
    """<gpu>-x2-<date>-distributed.json, where machine.py puts results."""
    path, date = machine.result_path("distributed"), machine.describe()["date"]
    return path.with_name(path.name.replace(date, f"x{RANKS}-{date}"))


def table(lines: list[Line], links: dict[str, float]) -> str:
    rows = [f"{'line':36} {'one ms':>10} {'two ms':>10} {'of linear':>10}  goal"]
    for line in lines:
        mark = "" if line.goal is None else f"{line.goal:.2f}{'' if line.ratio >= line.goal else '  MISSED'}"
        rows.append(f"{line.name:36} {line.one_ms:10.3f} {line.two_ms:10.3f} {line.ratio:10.3f}  {mark}")
        rows += [f"    {name}: {value:.4g}" for name, value in (line.facts or {}).items()]
    return "\n".join(rows + [f"{name}: {value:.4g}" for name, value in links.items()])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--no-checks", action="store_true", help="only the figures")
    parser.add_argument("--json", type=Path, help="where the result goes; by default benchmarks/results/<gpu>-x2-<date>-distributed.json")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and torch.cuda.device_count() < RANKS:
        print(f"This needs {RANKS} CUDA GPUs, and there are {torch.cuda.device_count()}.")
        return 2
    sizes = Sizes() if given.device == "cuda" else TINY
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # as machines that share their switches want it; two GPUs gain nothing by it
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begin:.0f} s: {text}", flush=True)

    pair = World(RANKS, given.device, timeout_s=60)
    checked: list[dict[str, Any]] = []
    lines: list[Line] = []
    links: dict[str, float] = {}
    try:
        say("processes are up")
        if not given.no_checks:
            checked.append(run_checks(pair, checks()))
            say(f"checks {checked[-1]}")
        for measure in ("measure_prefill", "measure_decode"):
            lines += pair.run("benchmarks.distributed", measure, sizes)[0]
        links = pair.run("benchmarks.distributed", "measure_links", sizes)[0]
        links |= pair.run("benchmarks.distributed", "measure_host", sizes)[0]
        say("figures\n" + table(lines, links))
        if not given.no_checks and given.device == "cuda":
            checked.append(run_checks(pair, graph_checks()))
            say(f"checks in graphs {checked[-1]}")
    finally:
        pair.stop()
    faults = {}
    if not given.no_checks and given.device == "cuda":
        faults = run_faults()
        say(f"faults {faults}")
    path = given.json or result_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {
        **machine.describe(),
        "gpus": RANKS,
        "nccl": _nccl(),
        "sizes": asdict(sizes),
        "checks": checked,
        "faults": faults,
        "links": links,
    }
    path.write_text(json.dumps(result | {"lines": [asdict(line) for line in lines]}, indent=1) + "\n")
    say(str(path))
    return 1 if any(part["failed"] for part in checked) else 0


def _nccl() -> str | None:
    return ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None


if __name__ == "__main__":
    sys.exit(main())
