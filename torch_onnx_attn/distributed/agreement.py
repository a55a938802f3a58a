"""Whether all ranks of a group were called alike: each tells the others what it was given, or what is wrong with that.

A collective whose ranks disagree hangs until its timeout, or returns rubbish. Comparing first costs the host one small exchange (about
1 ms on one machine) and cannot be captured in a CUDA graph, so it is done where the host communicates anyway, which is gloo, and
elsewhere under ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, torch's own switch for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def agree(group: dist.ProcessGroup, call: str, check: Callable[[], dict[str, Any]]) -> None:
    """Runs ``check``, which raises, or returns by argument name what all ranks must have been given alike.

    Raises:
        RuntimeError: what ``check`` raised on this rank. Where ranks are compared, on every rank: what it raised on any of them, or the
            first argument that differs.
    """
    if not _compares(group):
        check()
        return
    failure = None
    mine: dict[str, Any] | str
    try:
        mine = {"call": call} | check()
    except Exception as error:  # whatever it is, the others must hear of it
        failure, mine = error, str(error)
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, mine, group=group)
    if failure is not None:
        raise failure
    for rank, theirs in enumerate(told):
        if isinstance(theirs, str):
            raise RuntimeError(f"{theirs} (on rank {rank} of the group)")
    for rank, theirs in enumerate(told):
        for name in told[0] | theirs:
            first, other = told[0].get(name), theirs.get(name)
            if first != other:
                raise RuntimeError(
                    f"{name}: is {first} on rank 0 of the group, but {other} on rank {rank}; it must be the same on every rank"
                )


def shape_and_type(tensor: Tensor | None) -> str | None:
    """What two ranks' tensors must have in common to be sent."""
    return None if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def values(numbers: Tensor | None) -> Any:
    """The numbers, where the host may read them."""
    return shape_and_type(numbers) if numbers is None or numbers.device.type != "cpu" else numbers.tolist()


def _compares(group: dist.ProcessGroup) -> bool:
    """The same on every rank: it depends on the group and on the environment only."""
    if dist.get_world_size(group) == 1:
        return False
    backends = {pair.partition(":")[2] for pair in str(dist.get_backend_config(group)).split(",")}
    if backends == {"gloo"}:
        return True
    if dist.get_debug_level() != dist.DebugLevel.DETAIL:  # type: ignore[attr-defined]
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
