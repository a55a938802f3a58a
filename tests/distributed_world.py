"""Processes that stay up and run one check after another: starting them costs more than most checks."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import math
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# For a loaded machine, where what takes seconds takes minutes. A group gives up first: it says more than that there is no answer.
START_S, GROUP_S, ANSWER_S = 300.0, 240.0, 300.0
AFTER_FAILURE_S = 20.0  # how much longer the others may take, where the check has failed anyway


def message(call: Any) -> str:
    """The text of the error that the call raises."""
    try:
        call()
    except Exception as error:
        return str(error)
    raise AssertionError("no error")


@dataclass(frozen=True)
class Ranks:
    """What a check is told: where it runs, and with whom."""

    rank: int  # in the whole world
    size: int
    device: str  # "cpu" or "cuda"; the process's own GPU is the current one
    store: dist.Store

    def tell(self, word: str) -> None:
        """Says once to all ranks that this one has come to `word`; it stays said if this process ends."""
        self.store.set(f"{word} {self.rank}", "said")

    def hear(self, word: str, ranks: Iterable[int]) -> None:
        """Returns when those ranks have said it."""
        self.store.wait([f"{word} {rank}" for rank in ranks])

    def mesh(self, ranks: int | None = None) -> DeviceMesh:
        """A mesh of `ranks` processes, of which the world holds several if it is larger."""
        ranks = ranks or self.size
        if ranks not in _meshes:
            shape = init_device_mesh(self.device, (self.size // ranks, ranks), mesh_dim_names=("copies", "ranks"))
            _meshes[ranks] = shape["ranks"]
        return _meshes[ranks]


_meshes: dict[int, DeviceMesh] = {}


def enter(rank: int, size: int, device: str, path: str, timeout_s: float) -> Ranks:
    """Joins a new world; one GPU for each process on CUDA."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    options: dict[str, Any] = {}
    if device == "cuda":
        torch.cuda.set_device(rank)
        options["device_id"] = torch.device("cuda", rank)
    store = dist.FileStore(path, size)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout_s),
        **options,
    )
    return Ranks(rank, size, device, store)


def _serve(rank: int, size: int, device: str, path: str, timeout_s: float, link: Connection) -> None:
    try:
        ranks = enter(rank, size, device, path, timeout_s)
    except BaseException:
        link.send((None, traceback.format_exc()))
        return
    link.send((None, ""))
    while True:
        task = link.recv()
        if task is None:
            break
        module, function, arguments = task
        try:
            link.send((getattr(importlib.import_module(module), function)(ranks, *arguments), ""))
        except BaseException:
            link.send((None, traceback.format_exc()))
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


@dataclass(frozen=True)
class Answer:
    """What a check came to on one rank."""

    rank: int
    value: Any  # what it returned
    failure: str  # the traceback of its error, or why there is no answer; empty where it returned
    given: bool = True  # False from a rank that is dead or hangs

    def result(self) -> Any:
        """What it returned; an AssertionError that says why if it did not."""
        assert not self.failure, told([self])
        return self.value


def told(answers: list[Answer]) -> str:
    """What went wrong, rank by rank; empty if nothing did."""
    return "\n".join(f"rank {answer.rank}: {answer.failure}" for answer in answers if answer.failure)


class World:
    """`size` processes on this machine. Gloo on the CPU, NCCL on CUDA."""

    def __init__(self, size: int, device: str = "cpu", timeout_s: float = GROUP_S) -> None:
        self.size, self.device, self.timeout_s = size, device, timeout_s
        self.start()

    def start(self) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        # A fork server imports torch once. But CUDA must not be forked, and the server's socket has room for a short path only.
        forks = self.device == "cpu" and len(os.fsencode(tempfile.gettempdir())) < 64
        context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
        if forks:
            context.set_forkserver_preload(["torch", "torch.distributed.tensor", "torch_onnx_attn"])
        self._folder = tempfile.TemporaryDirectory()
        self.links, self.processes = [], []
        for rank in range(self.size):
            here, there = context.Pipe()
            arguments = (rank, self.size, self.device, os.path.join(self._folder.name, "store"), self.timeout_s, there)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()  # the process has the only one, so that its end is noticed
            self.links.append(here)
            self.processes.append(process)
        failures = told(self._answers(START_S, AFTER_FAILURE_S))
        if failures:
            self.stop()
            raise RuntimeError(f"not every process came up:\n{failures}")

    def results(self, module: str, function: str, *arguments: Any, timeout_s: float = ANSWER_S) -> list[Answer]:
        """What the check came to on each rank, dead and hanging ones included."""
        self._ask(module, function, arguments)
        return self._answers(timeout_s)

    def _ask(self, *task: Any) -> None:
        if not self.processes:
            self.start()
        for link in self.links:
            with contextlib.suppress(OSError):  # that it is dead is its answer
                link.send(task)

    def _answers(self, timeout_s: float, after_failure_s: float = math.inf) -> list[Answer]:
        begin = time.monotonic()
        end = begin + timeout_s
        answers: dict[int, Answer] = {}
        while len(answers) < self.size:
            waited_for = {link: rank for rank, link in enumerate(self.links) if rank not in answers}
            ready = wait(list(waited_for), max(0.0, end - time.monotonic()))
            if not ready:
                break
            for rank in (waited_for[link] for link in ready):
                answers[rank] = self._answer(rank)
                if answers[rank].failure:
                    end = min(end, time.monotonic() + after_failure_s)
        silence = f"no answer within {time.monotonic() - begin:.0f} s"
        return [answers.get(rank) or Answer(rank, None, silence, given=False) for rank in range(self.size)]

    def _answer(self, rank: int) -> Answer:
        try:
            return Answer(rank, *self.links[rank].recv())
        except (EOFError, OSError):
            self.processes[rank].join(60)
            return Answer(rank, None, f"its process ended with exit code {self.processes[rank].exitcode}", given=False)

    def run(self, module: str, function: str, *arguments: Any) -> list[Any]:
        """What each rank returned; an AssertionError with every rank's failure if one did not."""
        self._ask(module, function, arguments)
        answers = self._answers(ANSWER_S, AFTER_FAILURE_S)
        failures = told(answers)
        if failures:  # the next check must meet neither a rank that still works on this one nor a broken group
            self.stop()
        assert not failures, failures
        return [answer.value for answer in answers]

    def stop(self) -> None:
        for link in self.links:
            with contextlib.suppress(OSError):
                link.send(None)
        end = time.monotonic() + 10
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for link in self.links:
            link.close()
        self.links, self.processes = [], []
        self._folder.cleanup()


@contextlib.contextmanager
def world(size: int, device: str = "cpu") -> Iterator[World]:
    made = World(size, device)
    try:
        yield made
    finally:
        made.stop()
