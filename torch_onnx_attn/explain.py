"""Which kernel a call would take, without running it."""

from __future__ import annotations

import json
from collections.abc import Callable
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
        kernel: ``cpu``, ``general`` (the CUDA kernel that takes everything), or ``nothing`` for an empty output.
        separate_append: whether past or new rows are written by a kernel of their own first.
        workspace_bytes: scratch memory beyond inputs and outputs.
    """

    kernel: str
    separate_append: bool
    workspace_bytes: int


def explain(op: Callable[..., Any], *args: Any, machine: Machine | None = None, **kwargs: Any) -> Plan:
    """The plan of ``op(*args, **kwargs)``. The call is checked as usual but nothing is computed or written.

    Args:
        op: an op of ``torch.ops.onnx_attn`` that attends, or a function of this package that calls one.
        machine: plan for this machine instead of the tensors' own; CPU tensors will do, so that it works without a GPU.

    Raises:
        RuntimeError: as the call itself would, or when it does not attend at all.
    """
    record_plans = torch.ops.onnx_attn._record_plans
    record_plans(True, [int(field) for field in machine] if machine else [])
    try:
        op(*args, **kwargs)
    finally:
        record_plans(False, [])
    recorded = torch.ops.onnx_attn._recorded_plan()
    if recorded is None:
        raise RuntimeError("op: made no attention call, so there is no plan to explain")
    return Plan(**json.loads(bytes(recorded.tolist())))
