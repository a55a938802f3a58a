"""What the kernels ask of an argument that they write in place, for calls that are traced: each element in memory of its own, and
nothing that is read there. Known sizes and strides are looked at, of tensors that share a storage."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .fake_checks import Size, check, differ

__all__ = ["check_written"]

# Read as a copy unless the last axis has a stride of 1.
_MADE_CONTIGUOUS = ("Q", "K", "V", "query", "key", "value", "bias", "write_indices", "cache_indirection")


def check_written(written: Mapping[str, Tensor], read: Mapping[str, Tensor]) -> None:
    """``written``, ``read``: the tensors of a call by name."""
    for name, tensor in written.items():
        _check_own_memory(name, tensor)
    others = dict(written) | {name: tensor for name, tensor in read.items() if not _is_copied(name, tensor)}
    for name, tensor in written.items():
        del others[name]  # a pair of written tensors is looked at once
        for other, meant in others.items():
            overlap = f"{other}: overlaps {name}, which is written in place, in the memory that the two span"
            check(not _meet(tensor, meant), f"{overlap}; they must be different storage")


def _check_own_memory(name: str, tensor: Tensor) -> None:
    """Every axis must step over all that the axes of smaller strides span."""
    if any(isinstance(size, int) and size == 0 for size in tensor.shape):
        return
    steps = zip(tensor.stride(), tensor.shape, range(tensor.dim()), strict=True)
    known = [step for step in steps if isinstance(step[0], int) and isinstance(step[1], int) and step[1] > 1]
    reach = 0
    for stride, size, axis in sorted(known):
        what = f"{name}: is written in place, but axis {axis} has stride {stride}{'' if stride else ' (it is expanded)'}"
        check(stride > reach, f"{what}, so that elements share memory or interleave; pass a tensor with storage of its own")
        reach += (size - 1) * stride


def _is_copied(name: str, tensor: Tensor) -> bool:
    if name == "attn_mask":
        return not (tensor.dtype.is_floating_point or tensor.dtype == torch.bool)
    return name in _MADE_CONTIGUOUS and tensor.dim() > 0 and differ(tensor.stride(-1), 1) and differ(tensor.shape[-1], 1)


def _meet(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are known to reach between each other's first and last element."""
    if first.untyped_storage()._cdata != second.untyped_storage()._cdata:
        return False
    spans = _span(first), _span(second)
    if spans[0] is None or spans[1] is None:
        return False
    return bool(max(spans[0][0], spans[1][0]) < min(spans[0][1], spans[1][1]))


def _span(tensor: Tensor) -> tuple[Size, Size] | None:
    """In bytes from the begin of the storage; None where that is not known."""
    begin = tensor.storage_offset()
    if not all(isinstance(number, int) for number in (begin, *tensor.shape, *tensor.stride())):
        return None
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * tensor.itemsize, (begin + last + 1) * tensor.itemsize
