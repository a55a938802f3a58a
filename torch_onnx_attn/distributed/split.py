"""One call of context_parallel_attention on this rank, and the calls of the op that it is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .blocks import Call, Sight
from .sequence import Segment, segments


@dataclass(frozen=True)
class Split:
    """One call of context_parallel_attention: local tensors, and how they lie in the whole."""

    Q: Tensor
    K: Tensor
    V: Tensor
    attn_mask: Tensor | None
    lengths: Tensor | None
    sight: Sight
    attributes: dict[str, Any]  # of the op, without those that positions enter
    order: str
    group: dist.ProcessGroup
    rank: int
    ranks: int

    def queries(self) -> tuple[Segment, ...]:
        return segments(self.Q.shape[2], self.rank, self.ranks, self.order)

    def keys_of(self, rank: int) -> tuple[Segment, ...]:
        return segments(self.K.shape[2], rank, self.ranks, self.order)

    def run(self, op: Callable[..., Any], keys: Tensor, values: Tensor, call: Call, holder: int | None = None, **more: Any) -> Any:
        """The op on the slices that the call names. `holder`: whose keys these are; None means all, in the sequence's order."""
        rows, columns = slice(call.q_begin, call.q_end), slice(call.k_begin, call.k_end)
        K, V = keys[:, :, columns], values[:, :, columns]
        held = (Segment(0, 0, self.sight.kv_len),) if holder is None else self.keys_of(holder)
        mask = None if self.attn_mask is None else _mask_slice(self.attn_mask, self.Q.shape[2], rows, held, columns)
        if call.needs_mask:
            mask = _with_visible(mask, _visible(self, call, held))
        lengths = None
        if call.length_shift is not None:
            assert self.lengths is not None
            lengths = (self.lengths - call.length_shift).clamp(0, K.shape[2]) if call.length_shift or holder is not None else self.lengths
        return op(
            self.Q[:, :, rows],
            K,
            V,
            mask,
            nonpad_kv_seqlen=lengths,
            left_window_size=call.left,
            right_window_size=call.right,
            **self.attributes,
            **more,
        )


def _mask_slice(attn_mask: Tensor, q_rows: int, rows: slice, held: Sequence[Segment], columns: slice) -> Tensor:
    """The mask's part for some of this rank's rows and some of the keys held. Columns that it lacks at the end stay lacking."""
    if attn_mask.dim() >= 2 and attn_mask.shape[-2] == q_rows:
        attn_mask = attn_mask[..., rows, :]
    cuts = []
    for segment in held:  # the local columns as columns of the whole
        begin, end = max(segment.local, columns.start), min(segment.local + segment.rows, columns.stop)
        if begin < end:
            cuts.append(attn_mask[..., begin - segment.local + segment.start : end - segment.local + segment.start])
            if cuts[-1].shape[-1] < end - begin and segment is not held[-1]:
                cuts[-1] = _disallow_up_to(cuts[-1], end - begin)
    return cuts[0] if len(cuts) == 1 else torch.cat(cuts, -1)


def _disallow_up_to(mask: Tensor, columns: int) -> Tensor:
    """The mask with further columns that allow nothing, of a type that can say so."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        mask = mask.to(torch.float32)
    if mask.shape[-1] == columns:
        return mask
    lacking = mask.new_full((*mask.shape[:-1], columns - mask.shape[-1]), 0 if mask.dtype == torch.bool else float("-inf"))
    return torch.cat((mask, lacking), -1)


def _visible(split: Split, call: Call, held: Sequence[Segment]) -> Tensor:
    """bool [B, 1, rows, keys]: the op's own rule on causality and windows, for the one case that its arguments cannot say."""
    assert split.lengths is not None
    sight, device = split.sight, split.Q.device
    row = _positions(split.queries(), call.q_begin, call.q_end, device) + (split.lengths - sight.q_len)[:, None]  # [B, rows]
    key = _positions(held, call.k_begin, call.k_end, device)
    distance = key - row[..., None]
    visible = torch.ones_like(distance, dtype=torch.bool)
    if sight.left >= 0:
        visible = visible & (distance >= -sight.left)
    if sight.right >= 0:
        visible = visible & (distance <= sight.right)
    return visible[:, None]


def _positions(held: Sequence[Segment], begin: int, end: int, device: torch.device) -> Tensor:
    """Where the local rows begin ... end, which lie in one segment, are in the whole sequence."""
    (segment,) = (segment for segment in held if segment.local <= begin and end <= segment.local + segment.rows)
    return torch.arange(begin, end, device=device) - segment.local + segment.start


def _with_visible(mask: Tensor | None, visible: Tensor) -> Tensor:
    """Both masks in one. A mask with fewer columns than keys disallows the rest."""
    if mask is None:
        return visible
    if mask.dtype == torch.bool:
        return _disallow_up_to(mask, visible.shape[-1]) & visible
    return _disallow_up_to(mask, visible.shape[-1]).masked_fill(~visible, float("-inf"))
