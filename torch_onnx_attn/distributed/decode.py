"""Decoding with caches that are split along the sequence: each rank holds some of the positions of every batch entry.

Position p lies on rank ``p // block_size % n``, at row ``p // (block_size * n) * block_size + p % block_size``: blocks dealt round the
ranks, so that every rank holds, and reads, the same share of a sequence of any length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .agreement import agree, shape_and_type, values
from .blocks import right_bound
from .checks import check_attributes, check_heads, check_mask, check_on, check_plain, check_written
from .merge import merged_over_group
from .sequence import forward_only, group_of, never_compiled
from .watch import expected_call


@never_compiled
def context_parallel_cached(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cache_lengths: Tensor,
    *,
    mesh: DeviceMesh | dist.ProcessGroup,
    block_size: int = 64,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    left_window_size: int = -1,
    right_window_size: int = -1,
) -> Tensor:
    """:func:`torch_onnx_attn.attention_cached` with caches split along the sequence; the same result on every rank.

    Each rank appends the rows that fall to it, attends to its own positions, and one all-gather of Y and its log-sum-exp merges the
    parts. All lengths stay on the device: it can be captured in a CUDA graph. ``cache_lengths`` itself is not advanced. A single new
    row is written on every rank, in the next row that is free.

    Args:
        Q: ``[B, Hq, L, D]``, the same on every rank.
        K, V: ``[B, Hkv, L, D]`` and ``[B, Hkv, L, Dv]``, the new rows, the same on every rank.
        key_cache, value_cache: ``[B, Hkv, C, D]`` and ``[B, Hkv, C, Dv]``, **written in place**: this rank's positions, C a multiple of
            block_size. The capacity of the whole is n * C.
        cache_lengths: int64 or int32 ``[B]``: positions in use before this call, on all ranks together. On CUDA, rows that do not fit
            are dropped.
        mesh: a mesh with one dimension, or a process group.
        block_size: how many neighbouring positions lie on one rank. C makes each rank's part one stretch of the sequence.
        attn_mask: aligned right to ``[B, Hq, L, n * C]``, the same on every rank; columns are positions. Each rank selects its own.
        is_causal and the other attributes: as for :func:`torch_onnx_attn.attention_cached`. A window, or causality for more than one
            row, makes a bool mask ``[B, 1, L, C]``.

    Returns:
        ``[B, Hq, L, Dv]`` in Q's dtype.

    Raises:
        RuntimeError: naming the argument, what was given and what is allowed, before anything is written. Between ranks as for
            :func:`context_parallel_attention`.
    """
    group = group_of(mesh)
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    attributes = {"scale": scale, "softcap": softcap, "softmax_precision": softmax_precision}

    def check() -> dict[str, Any]:
        check_heads(Q, K, V, group)
        check_attributes(attributes, left_window_size, right_window_size)
        _check_caches(Q, K, V, key_cache, value_cache, cache_lengths, block_size, ranks)
        if attn_mask is not None:
            check_mask(attn_mask, Q, ranks * key_cache.shape[2])
        tensors = {"Q": Q, "K": K, "V": V, "key_cache": key_cache, "value_cache": value_cache, "attn_mask": attn_mask}
        windows = {"left_window_size": left_window_size, "right_window_size": right_window_size, "is_causal": bool(is_causal)}
        same = {"cache_lengths": values(cache_lengths), "block_size": block_size, **attributes, **windows}
        return {name: shape_and_type(tensor) for name, tensor in tensors.items()} | same

    def attend() -> Tensor:
        start = cache_lengths.to(torch.int64)
        valid = _append(((key_cache, K), (value_cache, V)), start, rank, ranks, block_size)
        right = right_bound(is_causal, right_window_size)
        is_windowed = left_window_size >= 0 or (right >= 0 and Q.shape[2] > 1)
        mask = None
        if attn_mask is not None or is_windowed:
            positions = positions_of(torch.arange(key_cache.shape[2], device=Q.device), rank, ranks, block_size)
            mask = None if attn_mask is None else _columns_at(attn_mask, positions)
            if is_windowed:
                mask = _within(mask, start, positions, Q.shape[2], left_window_size, right)
        with expected_call():
            Y, lse = torch.ops.onnx_attn.attention.lse(
                Q, key_cache, value_cache, mask, nonpad_kv_seqlen=valid, return_lse=True, **attributes
            )
        return merged_over_group(Y, lse, group)

    agree(group, "context_parallel_cached", check)
    return forward_only(attend, Q, K, V, *(() if attn_mask is None else (attn_mask,)))


def positions_of(row: Tensor, rank: int, ranks: int, block_size: int) -> Tensor:
    """The positions that lie at these rows of `rank`."""
    return (row // block_size * ranks + rank) * block_size + row % block_size


def shard_cache(cache: Tensor, mesh: DeviceMesh | dist.ProcessGroup, *, block_size: int = 64) -> Tensor:
    """This rank's positions of a cache ``[B, Hkv, n * C, D]`` that every rank has in full: ``[B, Hkv, C, D]``."""
    group = group_of(mesh)
    ranks = dist.get_world_size(group)
    check_plain("cache", cache)
    if cache.dim() != 4:
        raise RuntimeError(f"cache: has shape {list(cache.shape)}; it must have 4 axes, [batch, heads, rows, head size]")
    if block_size < 1:
        raise RuntimeError(f"block_size: is {block_size}; it must be positive")
    if cache.shape[2] % (ranks * block_size):
        raise RuntimeError(f"cache: has {cache.shape[2]} rows; it must be a multiple of {ranks} ranks times block_size = {block_size}")
    row = torch.arange(cache.shape[2] // ranks, device=cache.device)
    return cache[:, :, positions_of(row, dist.get_rank(group), ranks, block_size)]


def _check_caches(
    Q: Tensor, K: Tensor, V: Tensor, key_cache: Tensor, value_cache: Tensor, cache_lengths: Tensor, block_size: int, ranks: int
) -> None:
    for name, tensor in (("key_cache", key_cache), ("value_cache", value_cache)):
        check_plain(name, tensor)
        if tensor.dim() != 4 or tensor.device != Q.device:
            given = f"{list(tensor.shape)} on {tensor.device}"
            raise RuntimeError(f"{name}: is {given}; it must be [batch, heads, rows, head size] on {Q.device}, like Q")
    rows, capacity = K.shape[2], key_cache.shape[2]
    if block_size < 1 or capacity % block_size:
        raise RuntimeError(f"block_size: is {block_size}; it must be positive and divide the {capacity} rows of key_cache")
    if value_cache.shape[2] != capacity:
        raise RuntimeError(f"value_cache: has {value_cache.shape[2]} rows, but key_cache has {capacity}")
    if Q.shape[2] != rows:
        raise RuntimeError(f"Q: has {Q.shape[2]} rows, but K has {rows}; they must be the same new rows")
    if not 0 < rows <= capacity:
        raise RuntimeError(f"K: has {rows} new rows; allowed are 1 to {capacity}, the rows of key_cache on each rank")
    check_on("cache_lengths", cache_lengths, Q)
    if cache_lengths.shape != Q.shape[:1] or cache_lengths.dtype not in (torch.int64, torch.int32):
        given = f"{cache_lengths.dtype} {list(cache_lengths.shape)}"
        raise RuntimeError(f"cache_lengths: is {given}; it must be int64 or int32 [{Q.shape[0]}]")
    for name, cache, source, new in (("key_cache", key_cache, "K", K), ("value_cache", value_cache, "V", V)):
        if cache.dtype != new.dtype or cache.shape[:2] != new.shape[:2] or cache.shape[3] != new.shape[3]:
            given = f"is {cache.dtype} {list(cache.shape)}, but {source} is {new.dtype} {list(new.shape)}"
            raise RuntimeError(f"{name}: {given}; all but the rows must agree")
    read = {"Q": Q, "K": K, "V": V}
    check_written("key_cache", key_cache, {"value_cache": value_cache, **read})
    check_written("value_cache", value_cache, read)
    whole = ranks * capacity
    if not cache_lengths.is_cuda and bool(((cache_lengths < 0) | (cache_lengths + rows > whole)).any()):
        raise RuntimeError(f"cache_lengths: is {cache_lengths.tolist()}; with {rows} new rows they must be 0 to {whole - rows}")


def _append(writes: Sequence[tuple[Tensor, Tensor]], start: Tensor, rank: int, ranks: int, block_size: int) -> Tensor:
    """Writes the new rows that fall to this rank, and returns how many of its rows are in use afterwards: int64 [B].

    writes: caches [B, H, C, D] and their new rows [B, H, L, D]; start [B]. Nothing is read by the host. A decoding step is made of
    small kernels that each cost as much as 10 MB of cache, so the case of one row has the fewest that do it.
    """
    turn = block_size * ranks
    ahead = start - rank * block_size  # of this rank's first position
    in_turn = ahead % turn
    first = torch.add(in_turn.clamp(max=block_size), ahead // turn, alpha=block_size)  # rows in use so far
    if writes[0][1].shape[2] == 1:
        for cache, new in writes:
            _write_next(cache, new, first)
        return first + (in_turn < block_size)
    capacity, rows = writes[0][0].shape[2], writes[0][1].shape[2]
    # The rows that could be written follow each other. Past the capacity this wraps to rows of earlier positions, which are not new.
    row = (first[:, None] + torch.arange(rows, device=start.device)) % capacity
    source = positions_of(row, rank, ranks, block_size) - start[:, None]
    is_new = source // rows == 0
    for cache, new in writes:
        index = row[:, None, :, None].expand(-1, cache.shape[1], -1, cache.shape[3])
        chosen = source.clamp(0, rows - 1)[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3])
        cache.scatter_(2, index, torch.where(is_new[:, None, :, None], new.gather(2, chosen), cache.gather(2, index)))
    return first.clamp(max=capacity) + is_new.sum(1)


def _write_next(cache: Tensor, new: Tensor, first: Tensor) -> None:
    """One new row in the next free row, if there is one: not in use yet where the row falls to another rank, so nobody reads it."""
    if cache.is_cuda:
        torch.ops.onnx_attn.tensor_scatter_(cache, new, first, axis=2)  # drops what does not fit; on the CPU that is an error
    else:
        fits = first < cache.shape[2]
        cache[fits, :, first[fits]] = new[fits, :, 0]


def _columns_at(attn_mask: Tensor, positions: Tensor) -> Tensor:
    """The mask's columns at these positions. Columns that it lacks allow nothing."""
    columns = attn_mask.shape[-1]
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        attn_mask = attn_mask.to(torch.float32)
    nothing = 0 if attn_mask.dtype == torch.bool else float("-inf")
    if columns == 0:
        return attn_mask.new_full((*attn_mask.shape[:-1], len(positions)), nothing)
    return attn_mask.index_select(-1, positions.clamp(max=columns - 1)).masked_fill(positions >= columns, nothing)


def _within(mask: Tensor | None, start: Tensor, positions: Tensor, rows: int, left: int, right: int) -> Tensor:
    """The mask, and the window around each row's own position: bool [B, 1, L, C] or the mask's type."""
    own = start[:, None] + torch.arange(rows, device=start.device)
    distance = positions - own[..., None]  # [B, L, C]
    inside = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        inside = inside & (distance >= -left)
    if right >= 0:
        inside = inside & (distance <= right)
    inside = inside[:, None]
    if mask is None:
        return inside
    return mask & inside if mask.dtype == torch.bool else mask.masked_fill(~inside, float("-inf"))
