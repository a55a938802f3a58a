"""How a line is timed. Every method gives each candidate of a line the same treatment, in turns, and takes the median.

On a machine without CUDA everything falls back to the wall clock; the numbers mean little there, but the harness can be tested.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.candidates import Candidate

METHODS = {
    "events": "one eager call between two events, after 256 MB were rewritten (L2 cold)",
    "graph": "replay of a CUDA graph of one call, between two events, after 256 MB were rewritten (L2 cold)",
    "chained": "CUDA graph of consecutive calls over rotated caches (256 MB or more), per call",
    "host_no_grad": "host time per eager call under torch.no_grad, calls queued back to back",
    "host_inference_mode": "host time per eager call under torch.inference_mode, calls queued back to back",
    "memory": "peak of allocated memory during one call, less inputs and outputs",
}
MODES = {"host_no_grad": torch.no_grad, "host_inference_mode": torch.inference_mode}
FLUSH_BYTES = 256 << 20
HEAD_START_CYCLES = 2_000_000  # about 1 ms in which the host queues ahead, so that its pace does not enter event times
CHAIN_CALLS = 16  # calls in a chained graph, at least; a whole number of turns through the input sets
HOST_CALLS = 200  # below the depth of the launch queue


@dataclass(frozen=True)
class Effort:
    rounds: int  # turns of every candidate
    block_ms: float  # device time of a turn
    max_samples: int  # in a turn
    host_batches: int


FULL = Effort(rounds=4, block_ms=50.0, max_samples=100, host_batches=10)
QUICK = Effort(rounds=2, block_ms=20.0, max_samples=40, host_batches=5)


@dataclass(frozen=True)
class Sampler:
    take: Callable[[int], list[float]]  # a number of samples -> that many milliseconds per call
    calls: int = 1  # calls in one sample


class Timer:
    def __init__(self, device: str, effort: Effort) -> None:
        self.device = device
        self.cuda = device == "cuda"
        self.effort = effort
        self._flush = torch.empty(FLUSH_BYTES // 4 if self.cuda else 1, dtype=torch.int32, device=device)

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def measure(self, candidates: list[Candidate], method: str) -> tuple[dict[str, float], dict[str, str]]:
        """The median of each candidate, and why some have none. Milliseconds, or bytes for "memory"."""
        samplers: dict[str, Sampler] = {}
        refused: dict[str, str] = {}
        samples: dict[str, list[float]] = {}
        for candidate in candidates:
            try:
                with candidate.context():
                    samplers[candidate.name] = self._sampler(candidate, method)
                samples[candidate.name] = []
            except Exception as error:
                refused[candidate.name] = explain(error)
        for turn in range(1 if method == "memory" else self.effort.rounds):
            for candidate in turn_order(candidates, turn):
                if candidate.name in refused:
                    continue
                try:
                    with candidate.context():
                        samples[candidate.name] += self._one_turn(samplers[candidate.name], method)
                except Exception as error:
                    refused[candidate.name] = explain(error)
        return {name: statistics.median(times) for name, times in samples.items() if name not in refused}, refused

    def _one_turn(self, sampler: Sampler, method: str) -> list[float]:
        if method == "memory":
            return sampler.take(1)
        if method in MODES:
            return sampler.take(self.effort.host_batches)
        sample_ms = max(min(sampler.take(2)) * sampler.calls, 1e-3)
        return sampler.take(int(min(self.effort.max_samples, max(3, self.effort.block_ms / sample_ms))))

    def _sampler(self, candidate: Candidate, method: str) -> Sampler:
        """Everything that usually fails, if it does (warm-up, compilation, capture), happens here, once."""
        for call in candidate.calls:
            call()
            call()
        self.synchronize()
        first = candidate.calls[0]
        if method == "memory":
            return Sampler(lambda count: [float(self._peak_bytes(first)) for _ in range(count)])
        if method in MODES:
            return Sampler(lambda count: self._host(first, MODES[method], count))
        if method == "events":
            return Sampler(partial(self._wall if candidate.own_stream or not self.cuda else self.events, first))
        if candidate.own_stream:
            raise ValueError("runs on a stream of its own, cannot be captured")
        turns = max(1, CHAIN_CALLS // len(candidate.calls))
        calls = candidate.calls * turns if method == "chained" else [first]
        if self.cuda:
            take = partial(self.events, capture(calls), flush=method == "graph")
        else:
            take = partial(self._wall, lambda: [call() for call in calls])
        return Sampler(lambda count: [ms / len(calls) for ms in take(count)], len(calls))

    def events(self, call: Callable[[], Any], count: int, flush: bool = True) -> list[float]:
        starts = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
        call()
        torch.cuda._sleep(HEAD_START_CYCLES)
        for start, end in zip(starts, ends, strict=True):
            if flush:
                self._flush.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]

    def _wall(self, call: Callable[[], Any], count: int) -> list[float]:
        """For calls that synchronize by themselves, and for the CPU."""
        times = []
        for _ in range(count):
            self._flush.zero_()
            self.synchronize()
            begin = time.perf_counter()
            call()
            self.synchronize()
            times.append((time.perf_counter() - begin) * 1e3)
        return times

    def _host(self, call: Callable[[], Any], mode: Callable[[], Any], count: int) -> list[float]:
        times = []
        with mode():
            for _ in range(count):
                self.synchronize()
                begin = time.perf_counter()
                for _ in range(HOST_CALLS):
                    call()
                times.append((time.perf_counter() - begin) * 1e3 / HOST_CALLS)
        self.synchronize()
        return times

    def _peak_bytes(self, call: Callable[[], Any]) -> int:
        if not self.cuda:
            return 0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call()
        torch.cuda.synchronize()
        outputs = torch.cuda.memory_allocated() - before
        peak = torch.cuda.max_memory_allocated()
        del result
        return peak - before - outputs


def turn_order(candidates: list[Candidate], turn: int) -> list[Candidate]:
    """Forwards, backwards, then the same from another start: nobody always runs after the same neighbour."""
    start = (turn // 2) % max(1, len(candidates))
    order = candidates[start:] + candidates[:start]
    return order[::-1] if turn % 2 else order


def capture(calls: list[Callable[[], Any]]) -> Callable[[], None]:
    """A CUDA graph of the calls, in order. They have been warmed up."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def explain(error: BaseException, told: Sequence[str] = ()) -> str:
    """An exception in one line, with what the library warned of: SDPA says only in warnings why a backend refuses."""
    reasons = [text.split(" (Triggered internally")[0] for text in told]
    reasons = [text for text in reasons if not text.endswith(("not used because:", "has been runtime disabled.", "runtime disabled"))]
    text = " ".join(" ".join([str(error), *dict.fromkeys(reasons)]).split())
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__
