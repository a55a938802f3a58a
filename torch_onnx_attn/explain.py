"""Which kernel a call takes, why a faster one was refused, and how to choose another."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch


class Machine(NamedTuple):
    """The machine that a plan is made for.

    Attributes:
        is_cuda: False for the CPU kernels.
        capability: compute capability times ten, such as 90 for 9.0.
        sm_count: streaming multiprocessors.
        max_shared_memory: bytes of shared memory that one block may ask for.
    """

    is_cuda: bool = False
    capability: int = 0
    sm_count: int = 0
    max_shared_memory: int = 0


CPU = Machine()
H200 = Machine(True, 90, 132, 232448)


class Plan(NamedTuple):
    """What a call would do.

    Attributes:
        kernel: ``cpu``, a CUDA kernel (``decode``, ``forward_short``, ``forward_sm90``, ``forward_sm80``, ``forward_float32``, or
            ``general``, which takes everything), or ``nothing`` for an empty output.
        refusals: for each faster CUDA kernel, why it does not take the call.
        separate_append: whether past or new rows are written by a kernel of their own first.
        separate_bias: whether biased keys and values are stored in the workspace first.
        separate_scores: whether a scores output is written by a kernel of its own afterwards.
        workspace_bytes: scratch memory beyond inputs and outputs.
    """

    kernel: str
    refusals: dict[str, str]
    separate_append: bool
    separate_bias: bool
    separate_scores: bool
    workspace_bytes: int


class _Recordings(threading.local):
    depth = 0  # explain may be called inside explain


_recordings = _Recordings()


def is_recording() -> bool:
    """Whether calls of this thread are planned and not run."""
    return _recordings.depth > 0


def explain(op: Callable[..., Any], *args: Any, machine: Machine | None = None, **kwargs: Any) -> Plan:
    """The plan of ``op(*args, **kwargs)``. The call is checked as usual but nothing is computed or written, nor counted as a write.

    Args:
        op: an op of ``torch.ops.onnx_attn`` that attends, or a function of this package that calls one.
        machine: plan for this machine instead of the tensors' own; CPU tensors will do, so that it works without a GPU.

    Raises:
        RuntimeError: as the call itself would, or when it does not attend at all.
        ValueError: op cannot be called, or machine is no Machine.
    """
    if not callable(op):
        raise ValueError(f"op: is {op!r}, must be an op of torch.ops.onnx_attn that attends, or a function that calls one")
    if machine is not None and not isinstance(machine, Machine):
        raise ValueError(f"machine: is {machine!r}, must be a Machine, such as torch_onnx_attn.H200")
    torch.ops.onnx_attn._begin_recording([int(field) for field in machine] if machine else [])
    _recordings.depth += 1
    try:
        op(*args, **kwargs)
    finally:
        _recordings.depth -= 1
        recorded = torch.ops.onnx_attn._end_recording()
    if recorded is None:
        raise RuntimeError("op: made no attention call, so there is no plan to explain")
    return Plan(**json.loads(bytes(recorded.tolist())))


_preference = threading.local()


def _prefer(text: str) -> None:
    torch.ops.onnx_attn._prefer_kernels(list(text.encode()))
    _preference.text = text


def _is_one_name(name: Any) -> bool:
    """Whether it cannot be read as anything but the name of one kernel: a comma begins another choice, a hyphen forbids, and spaces
    around either are left out."""
    return isinstance(name, str) and name != "" and "," not in name and not name.startswith(("-", " ")) and not name.endswith(" ")


@contextmanager
def kernel(name: str | None = None, *, forbid: tuple[str, ...] = ()) -> Iterator[None]:
    """Forces one CUDA kernel, or forbids some, for the calls that this thread makes inside ``with``.

    A forced kernel that cannot take a call raises ``RuntimeError`` with its reason. The environment variable
    ``TORCH_ONNX_ATTN_KERNEL`` does the same for the process: ``general`` forces, ``-decode,-forward_sm90`` forbids; what cannot be
    read raises ``RuntimeError`` from the first call.

    Args:
        name: ``decode``, ``forward_short`` and ``forward_sm90`` (Hopper), ``forward_sm80``, ``forward_float32`` or ``general``.
        forbid: names that may not be chosen.

    Raises:
        RuntimeError: there is no such kernel.
        ValueError: what is given is no name, or name is also forbidden.
    """
    if name is not None and not _is_one_name(name):
        raise ValueError(f"name: is {name!r}, must be the name of a kernel, or None")
    if not isinstance(forbid, (tuple, list)) or not all(_is_one_name(forbidden) for forbidden in forbid):
        raise ValueError(f"forbid: is {forbid!r}, must be a tuple of names of kernels")
    if name in forbid:
        raise ValueError(f"forbid: has {name!r}, which name forces")
    outer = getattr(_preference, "text", "")
    _prefer(",".join([*([name] if name else []), *(f"-{forbidden}" for forbidden in forbid)]))
    try:
        yield
    finally:
        _prefer(outer)
