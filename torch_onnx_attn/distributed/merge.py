"""Results over parts of the keys, merged into the result over all of them by their log-sum-exps."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .sequence import all_gather, group_of


class Merged:
    """The result so far of attention whose keys come in parts. Sums are float32, or float64 for float64 results."""

    def __init__(self, Q: Tensor, v_head_size: int) -> None:
        self.dtype = Q.dtype
        self.sums = torch.float64 if Q.dtype == torch.float64 else torch.float32
        self.shape = (*Q.shape[:3], v_head_size)
        self.Y: Tensor | None = None
        self.lse = Q.new_full(self.shape[:3], float("-inf"), dtype=self.sums)

    def add(self, Y: Tensor, lse: Tensor, q_begin: int, q_end: int) -> None:
        """Takes in the result of some query rows over keys that have not been seen before.

        Y: ``[B, Hq, q_end - q_begin, Dv]``, lse: ``[B, Hq, q_end - q_begin]``.
        """
        if self.Y is None and (q_begin, q_end) == (0, self.shape[2]):
            self.Y, self.lse = Y.to(self.sums), lse.to(self.sums)
            return
        if self.Y is None:
            self.Y = Y.new_zeros(self.shape, dtype=self.sums)
        old, new = self.lse[:, :, q_begin:q_end], lse.to(self.sums)
        # Both -inf: no key so far, and inf - inf says nothing.
        weight = torch.sigmoid(new - old).nan_to_num(nan=0.0)
        self.Y[:, :, q_begin:q_end].lerp_(Y.to(self.sums), weight[..., None])
        old.copy_(torch.logaddexp(old, new))

    def result(self) -> Tensor:
        """Y ``[B, Hq, L, Dv]``; rows that saw no key are 0."""
        if self.Y is None:
            return self.lse.new_zeros(self.shape, dtype=self.dtype)
        return self.Y.to(self.dtype)


def merge_over_ranks(Y: Tensor, lse: Tensor, mesh: DeviceMesh | dist.ProcessGroup) -> Tensor:
    """Attention over the keys of all ranks from each rank's attention over its own: one small all-gather.

    The result has the same bits on every rank. No host synchronisation: it can be captured in a CUDA graph.

    Args:
        Y, lse: what ``torch.ops.onnx_attn.attention.lse`` returned on this rank: ``[B, Hq, L, Dv]`` and float32 ``[B, Hq, L]``.
        mesh: a mesh with one dimension, or a process group.

    Returns:
        ``[B, Hq, L, Dv]`` in Y's dtype. Rows without an allowed key on any rank are 0.
    """
    group = group_of(mesh)
    sums = torch.float64 if Y.dtype == torch.float64 else torch.float32
    mine = torch.cat((Y, lse.to(sums)[..., None]), -1)  # in the wider type of the two
    parts = mine.new_empty((dist.get_world_size(group), *mine.shape))
    all_gather(parts.flatten(0, 1), mine, group)
    weights = parts[..., -1:].softmax(0).nan_to_num(nan=0.0)  # NaN: every part is -inf
    return (parts[..., :-1] * weights).sum(0).to(Y.dtype)
