"""How a sequence lies on the ranks of a group, and the two functions that cut and join one.

Two orders are known, for n ranks:

    contiguous   rank r holds the r-th of n equal pieces
    zigzag       rank r holds pieces r and 2n - 1 - r of 2n equal ones: with causal attention every rank has the same work
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..autograd import _ForwardOnly
from .agreement import agree, shape_and_type
from .checks import check_plain, check_sent

ORDERS = ("contiguous", "zigzag")

Function = TypeVar("Function", bound=Callable[..., Any])


def never_compiled(function: Function) -> Function:
    """torch.compile breaks its graph at the function; torch.compiler.disable would load the compiler, which takes seconds, to say so."""
    return cast(Function, torch._disable_dynamo(function))  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Segment:
    """Rows that are neighbours both in the whole sequence and in a rank's tensor."""

    start: int  # position of the first row in the whole sequence
    local: int  # its row in the rank's tensor
    rows: int


def check_order(order: str) -> None:
    if order not in ORDERS:
        raise RuntimeError(f"order: is {order!r}; allowed are {' and '.join(map(repr, ORDERS))}")


def segments(rows: int, rank: int, ranks: int, order: str) -> tuple[Segment, ...]:
    """What rank `rank` holds when every one of `ranks` ranks holds `rows` rows."""
    if order == "contiguous":
        return (Segment(rank * rows, 0, rows),)
    piece = rows // 2
    return Segment(rank * piece, 0, piece), Segment((2 * ranks - 1 - rank) * piece, piece, piece)


def group_of(mesh: DeviceMesh | dist.ProcessGroup) -> dist.ProcessGroup:
    """The process group of a mesh with one dimension; a group is one already. This rank must be in it."""
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise RuntimeError(f"mesh: has {mesh.ndim} dimensions; name the one that holds the sequence, as in mesh['context']")
        if mesh.get_coordinate() is None:
            raise RuntimeError(f"mesh: is {mesh}, which rank {dist.get_rank()} is not in; call with a mesh or group of this rank's own")
        return mesh.get_group()
    if not isinstance(mesh, dist.ProcessGroup):
        raise RuntimeError(f"mesh: is {mesh!r}; it must be a DeviceMesh with one dimension, or a process group that this rank is in")
    return mesh


def shard_sequence(tensor: Tensor, mesh: DeviceMesh | dist.ProcessGroup, *, axis: int = -2, order: str = "contiguous") -> Tensor:
    """This rank's part of a tensor that every rank has in full. Communicates nothing.

    Args:
        tensor: any shape and type, a plain tensor; the length of `axis` must be a multiple of the number of ranks (for zigzag, of twice
            that).
        mesh: a mesh with one dimension, or a process group.
        axis: where the sequence is; -2 in ``[B, H, L, D]``.
        order: "contiguous" or "zigzag".

    Returns:
        A contiguous tensor.

    Raises:
        RuntimeError: naming the argument, what was given and what is allowed.
    """
    group = group_of(mesh)
    check_order(order)
    check_plain("tensor", tensor)
    _check_axis(tensor, axis)
    ranks, length = dist.get_world_size(group), tensor.shape[axis]
    pieces = ranks if order == "contiguous" else 2 * ranks
    if length % pieces:
        raise RuntimeError(
            f"tensor: axis {axis} has {length} rows; {order} order on {ranks} ranks needs a multiple of {pieces}: pad it, and say how many "
            "keys are valid by nonpad_kv_seqlen"
        )
    held = segments(length // ranks, dist.get_rank(group), ranks, order)
    return torch.cat([tensor.narrow(axis, segment.start, segment.rows) for segment in held], axis)


@never_compiled
def gather_sequence(tensor: Tensor, mesh: DeviceMesh | dist.ProcessGroup, *, axis: int = -2, order: str = "contiguous") -> Tensor:
    """The whole of a sequence of which every rank holds a part: what :func:`shard_sequence` cut, joined on every rank.

    Args:
        tensor: this rank's rows, of the same shape on every rank; any type. Forward only, as the ops are.
        mesh, axis, order: as for :func:`shard_sequence`.

    Raises:
        RuntimeError: naming the argument, what was given and what is allowed.
    """
    group = group_of(mesh)

    def check() -> dict[str, Any]:
        check_order(order)
        check_sent("tensor", tensor, group)
        _check_axis(tensor, axis)
        if order == "zigzag" and tensor.shape[axis] % 2:
            raise RuntimeError(f"tensor: axis {axis} has {tensor.shape[axis]} rows; zigzag order needs an even number")
        return {"tensor": shape_and_type(tensor), "axis": axis % tensor.dim(), "order": order}

    def gather() -> Tensor:
        gathered, work = start_gather(tensor.movedim(axis, 0), group)
        work.wait()
        return natural_order(gathered, dist.get_world_size(group), order).movedim(0, axis)

    agree(group, "gather_sequence", check)
    return forward_only(gather, tensor)


def _check_axis(tensor: Tensor, axis: int) -> None:
    if not -tensor.dim() <= axis < tensor.dim():
        raise RuntimeError(f"axis: is {axis}; a tensor of shape {list(tensor.shape)} has axes {-tensor.dim()} to {tensor.dim() - 1}")


def forward_only(call: Callable[[], Tensor], *inputs: Tensor) -> Tensor:
    """The call, which communicates and so has no derivative: a backward pass through its result is an error, as for the ops."""
    wanting = [tensor for tensor in inputs if tensor.requires_grad] if torch.is_grad_enabled() else []
    result: Tensor = _ForwardOnly.apply(call, *wanting) if wanting else call()  # type: ignore[no-untyped-call]
    return result


def start_gather(rows_first: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """All ranks' rows one rank after another, rows being axis 0, once the work is waited for."""
    rows_first = rows_first.contiguous()
    gathered = rows_first.new_empty((dist.get_world_size(group) * rows_first.shape[0], *rows_first.shape[1:]))
    work = all_gather(gathered, rows_first, group, async_op=True)
    assert work is not None
    return gathered, work


def all_gather(gathered: Tensor, mine: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> dist.Work | None:
    """torch's all-gather into one tensor, which torch 2.13 renamed. Both are contiguous."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = call(as_bytes(gathered), as_bytes(mine), group=group, async_op=async_op)
    return work


def as_bytes(contiguous: Tensor) -> Tensor:
    """The same memory as uint8, which every backend can send; gloo knows no 16-bit integers, for one."""
    return contiguous.view(-1).view(torch.uint8)


def natural_order(gathered: Tensor, ranks: int, order: str) -> Tensor:
    """Rows (axis 0) that lie one rank after another, as they follow each other in the sequence."""
    if order == "contiguous" or ranks == 1:
        return gathered
    pieces = gathered.unflatten(0, (ranks, 2, gathered.shape[0] // (2 * ranks)))
    return torch.cat((pieces[:, 0], pieces[:, 1].flip(0))).flatten(0, 1)


def rank_order(natural: Tensor, ranks: int, order: str) -> Tensor:
    """The inverse of :func:`natural_order`."""
    if order == "contiguous" or ranks == 1:
        return natural
    pieces = natural.unflatten(0, (2 * ranks, natural.shape[0] // (2 * ranks)))
    return torch.stack((pieces[:ranks], pieces[ranks:].flip(0)), 1).flatten(0, 2)
