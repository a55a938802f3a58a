"""Processes that stay up and run one check after another: starting them costs more than most checks."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


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

    def mesh(self, ranks: int | None = None) -> DeviceMesh:
        """A mesh of `ranks` processes, of which the world holds several if it is larger."""
        ranks = ranks or self.size
        if ranks not in _meshes:
            shape = init_device_mesh(self.device, (self.size // ranks, ranks), mesh_dim_names=("copies", "ranks"))
            _meshes[ranks] = shape["ranks"]
        return _meshes[ranks]


_meshes: dict[int, DeviceMesh] = {}


def enter(rank: int, size: int, device: str, store: str, timeout_s: float) -> Ranks:
    """Joins a new world; one GPU for each process on CUDA."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    options: dict[str, Any] = {}
    if device == "cuda":
        torch.cuda.set_device(rank)
        options["device_id"] = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout_s),
        **options,
    )
    return Ranks(rank, size, device)


def _serve(rank: int, size: int, device: str, store: str, timeout_s: float, link: Connection) -> None:
    ranks = enter(rank, size, device, store, timeout_s)
    link.send(None)
    while True:
        task = link.recv()
        if task is None:
            break
        module, function, arguments = task
        try:
            link.send((True, getattr(importlib.import_module(module), function)(ranks, *arguments)))
        except BaseException:
            link.send((False, traceback.format_exc()))
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


class World:
    """`size` processes on this machine. Gloo on the CPU, NCCL on CUDA."""

    def __init__(self, size: int, device: str = "cpu", timeout_s: float = 60.0) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        # A fork server imports torch once; CUDA must not be forked.
        context: Any = multiprocessing.get_context("spawn" if device == "cuda" else "forkserver")
        if device == "cpu":
            context.set_forkserver_preload(["torch", "torch.distributed.tensor", "torch_onnx_attn"])
        self.size, self.device = size, device
        self._folder = tempfile.TemporaryDirectory()
        self.links, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            arguments = (rank, size, device, os.path.join(self._folder.name, "store"), timeout_s, there)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self.links.append(here)
            self.processes.append(process)
        for link in self.links:
            if not link.poll(180):
                self.stop()
                raise RuntimeError("the processes did not come up within three minutes")
            link.recv()

    def results(self, module: str, function: str, *arguments: Any, timeout_s: float = 120.0) -> list[tuple[bool, Any] | None]:
        """What each rank returned (True, result), or the traceback of its error (False, text); None from a rank that died or hangs."""
        for link in self.links:
            link.send((module, function, arguments))
        end = time.monotonic() + timeout_s
        found: list[tuple[bool, Any] | None] = []
        for link in self.links:
            try:
                found.append(link.recv() if link.poll(max(0.0, end - time.monotonic())) else None)
            except (EOFError, OSError):
                found.append(None)
        return found

    def run(self, module: str, function: str, *arguments: Any) -> list[Any]:
        """What each rank returned; an AssertionError with the tracebacks if one raised."""
        found = self.results(module, function, *arguments)
        failures = [f"rank {rank}: {item[1] if item else 'no answer'}" for rank, item in enumerate(found) if item is None or not item[0]]
        assert not failures, "\n".join(failures)
        return [item[1] for item in found if item is not None]

    def stop(self) -> None:
        for link in self.links:
            with contextlib.suppress(OSError):
                link.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


@contextlib.contextmanager
def world(size: int, device: str = "cpu", timeout_s: float = 60.0) -> Iterator[World]:
    made = World(size, device, timeout_s)
    try:
        yield made
    finally:
        made.stop()
