"""How a sequence lies on the ranks of a group, and the two functions that cut and join one.

Two orders are known, for n ranks:

    contiguous   rank r holds the r-th of n equal pieces
    zigzag       rank r holds pieces r and 2n - 1 - r of 2n equal ones: with causal attention every rank has the same work
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

ORDERS = ("contiguous", "zigzag")


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
    """The process group of a mesh with one dimension; a group is one already."""
    if not isinstance(mesh, DeviceMesh):
        return mesh
    if mesh.ndim != 1:
        raise RuntimeError(f"mesh: has {mesh.ndim} dimensions; name the one that holds the sequence, as in mesh['context']")
    return mesh.get_group()


def shard_sequence(tensor: Tensor, mesh: DeviceMesh | dist.ProcessGroup, *, axis: int = -2, order: str = "contiguous") -> Tensor:
    """This rank's part of a tensor that every rank has in full. Communicates nothing.

    Args:
        tensor: any shape; the length of `axis` must be a multiple of the number of ranks (for zigzag, of twice that).
        mesh: a mesh with one dimension, or a process group.
        axis: where the sequence is; -2 in ``[B, H, L, D]``.
        order: "contiguous" or "zigzag".

    Returns:
        A contiguous tensor.

    Raises:
        RuntimeError: naming the argument, what was given and what is allowed.
    """
    check_order(order)
    group = group_of(mesh)
    ranks, length = dist.get_world_size(group), tensor.shape[axis]
    pieces = ranks if order == "contiguous" else 2 * ranks
    if length % pieces:
        raise RuntimeError(f"tensor: axis {axis} has {length} rows; {order} order on {ranks} ranks needs a multiple of {pieces}")
    held = segments(length // ranks, dist.get_rank(group), ranks, order)
    return torch.cat([tensor.narrow(axis, segment.start, segment.rows) for segment in held], axis)


def gather_sequence(tensor: Tensor, mesh: DeviceMesh | dist.ProcessGroup, *, axis: int = -2, order: str = "contiguous") -> Tensor:
    """The whole of a sequence of which every rank holds a part: what :func:`shard_sequence` cut, joined on every rank.

    Args:
        tensor: this rank's rows, of the same shape on every rank.
        mesh, axis, order: as for :func:`shard_sequence`.
    """
    check_order(order)
    group = group_of(mesh)
    if order == "zigzag" and tensor.shape[axis] % 2:
        raise RuntimeError(f"tensor: axis {axis} has {tensor.shape[axis]} rows; zigzag order needs an even number")
    gathered, work = start_gather(tensor.movedim(axis, 0), group)
    work.wait()
    return natural_order(gathered, dist.get_world_size(group), order).movedim(0, axis)


def start_gather(rows_first: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """All ranks' rows one rank after another, rows being axis 0, once the work is waited for."""
    rows_first = rows_first.contiguous()
    gathered = rows_first.new_empty((dist.get_world_size(group) * rows_first.shape[0], *rows_first.shape[1:]))
    work = all_gather(gathered, rows_first, group, async_op=True)
    assert work is not None
    return gathered, work


def all_gather(gathered: Tensor, mine: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> dist.Work | None:
    """torch's all-gather into one tensor, which torch 2.13 renamed."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = call(gathered, mine, group=group, async_op=async_op)
    return work


def natural_order(gathered: Tensor, ranks: int, order: str) -> Tensor:
    """Rows (axis 0) that lie one rank after another, as they follow each other in the sequence."""
    if order == "contiguous" or ranks == 1:
        return gathered
    pieces = gathered.unflatten(0, (ranks, 2, -1))
    return torch.cat((pieces[:, 0], pieces[:, 1].flip(0))).flatten(0, 1)


def rank_order(natural: Tensor, ranks: int, order: str) -> Tensor:
    """The inverse of :func:`natural_order`."""
    if order == "contiguous" or ranks == 1:
        return natural
    pieces = natural.unflatten(0, (2 * ranks, -1))
    return torch.stack((pieces[:ranks], pieces[ranks:].flip(0)), 1).flatten(0, 2)
