"""Results over parts of the keys, merged into the result over all of them by their log-sum-exps."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .agreement import agree, shape_and_type
from .checks import FLOATING, check_plain, check_sent
from .sequence import all_gather, forward_only, group_of, never_compiled


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
        # No key in this part: inf - inf would say nothing. Any other NaN is the inputs' own and stays one.
        weight = torch.sigmoid(new - old).masked_fill_(new == float("-inf"), 0.0)[..., None]
        # Not lerp: the difference of two results is no number where one is infinite.
        self.Y[:, :, q_begin:q_end].mul_(1 - weight).addcmul_(Y, weight)
        old.copy_(torch.logaddexp(old, new))

    def result(self) -> Tensor:
        """Y ``[B, Hq, L, Dv]``; rows that saw no key are 0."""
        if self.Y is None:
            return self.lse.new_zeros(self.shape, dtype=self.dtype)
        return self.Y.to(self.dtype)


@never_compiled
def merge_over_ranks(Y: Tensor, lse: Tensor, mesh: DeviceMesh | dist.ProcessGroup) -> Tensor:
    """Attention over the keys of all ranks from each rank's attention over its own: one small all-gather.

    The result has the same bits on every rank. No host synchronisation: it can be captured in a CUDA graph.

    Args:
        Y, lse: what ``torch.ops.onnx_attn.attention.lse`` returned on this rank: ``[B, Hq, L, Dv]`` and float32 ``[B, Hq, L]``.
        mesh: a mesh with one dimension, or a process group.

    Returns:
        ``[B, Hq, L, Dv]`` in Y's dtype. Rows without an allowed key on any rank are 0. Forward only, as the ops are.

    Raises:
        RuntimeError: naming the argument, what was given and what is allowed.
    """
    group = group_of(mesh)

    def check() -> dict[str, Any]:
        check_sent("Y", Y, group)
        check_plain("lse", lse)
        if Y.dim() != 4 or Y.dtype not in FLOATING:
            raise RuntimeError(f"Y: is {shape_and_type(Y)}; it must be floating, [batch, heads, rows, head size]")
        if lse.shape != Y.shape[:3] or lse.dtype != torch.float32 or lse.device != Y.device:
            raise RuntimeError(f"lse: is {shape_and_type(lse)} on {lse.device}; it must be torch.float32 {list(Y.shape[:3])} on {Y.device}")
        return {"Y": shape_and_type(Y)}

    agree(group, "merge_over_ranks", check)
    return forward_only(lambda: merged_over_group(Y, lse, group), Y, lse)


def merged_over_group(Y: Tensor, lse: Tensor, group: dist.ProcessGroup) -> Tensor:
    """As :func:`merge_over_ranks`, for arguments that have been checked."""
    sums = torch.float64 if Y.dtype == torch.float64 else torch.float32
    mine = torch.cat((Y, lse.to(sums)[..., None]), -1)  # in the wider type of the two
    parts = mine.new_empty((dist.get_world_size(group), *mine.shape))
    all_gather(parts, mine, group)
    sizes = parts[..., -1:]
    weights = sizes.softmax(0).masked_fill_(sizes == float("-inf"), 0.0)  # where every part is -inf, softmax is NaN
    return (parts[..., :-1] * weights).sum(0).to(Y.dtype)
