"""Attention of one sequence whose rows lie on several ranks, by three methods; forward only, like the op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .agreement import agree, shape_and_type, values
from .blocks import Sight, against_all_keys, right_bound, ring_calls
from .checks import check_attributes, check_heads, check_mask, check_on
from .merge import Merged
from .sequence import as_bytes, check_order, forward_only, group_of, natural_order, never_compiled, rank_order, start_gather
from .split import Split
from .watch import expected_call


@never_compiled
def context_parallel_attention(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    attn_mask: Tensor | None = None,
    *,
    mesh: DeviceMesh | dist.ProcessGroup,
    method: str = "allgather",
    order: str = "contiguous",
    nonpad_kv_seqlen: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    left_window_size: int = -1,
    right_window_size: int = -1,
) -> Tensor:
    """This rank's rows of :func:`torch_onnx_attn.attention` over a sequence that is split over the ranks of ``mesh``.

    Every rank calls it with the same arguments but for its own rows of Q, K, V and attn_mask. Below, l and s are the rows that each
    rank holds, L and S those of the whole: l and s times the number of ranks, n.

    Args:
        Q: ``[B, Hq, l, D]``, a plain tensor (not a DTensor), rows in ``order``.
        K, V: ``[B, Hkv, s, D]`` and ``[B, Hkv, s, Dv]``, rows in ``order``.
        attn_mask: this rank's rows and all columns: aligned right to ``[B, Hq, l, S]``, axes other than the last may be 1; columns in the
            sequence's own order.
        mesh: a mesh with one dimension, or a process group.
        method: "allgather": each rank gathers K and V; any head counts, memory for all of K and V. "ulysses": all-to-all from rows to
            heads and back; Hq and Hkv must be multiples of n, or n a multiple of Hkv. "ring": K and V travel round while the previous
            part is attended to; least memory, and the only one whose traffic hides behind the arithmetic.
        order: "contiguous" or "zigzag" (see :func:`shard_sequence`); zigzag balances causal attention for the ring and allgather.
        nonpad_kv_seqlen: int64 ``[B]``, of the whole sequence, the same on every rank; also moves the causal offset to
            ``nonpad_kv_seqlen[b] - L``. Together with causality or a window the ring makes a bool mask ``[B, 1, l, s]`` at each step.
        is_causal, scale, softcap, softmax_precision, left_window_size, right_window_size: as for :func:`torch_onnx_attn.attention`.

    Returns:
        ``[B, Hq, l, Dv]`` in Q's dtype. For the ring, parts are rounded to that dtype before they are merged in float32.

    Raises:
        RuntimeError: naming the argument, what was given and what is allowed. On gloo groups, and elsewhere under
            ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, on every rank, also where ranks were given different arguments. A rank that stalls or
            dies shows on the others as an error of the process group, at the latest after its timeout.
    """
    group = group_of(mesh)
    ranks = dist.get_world_size(group)
    attributes = {"scale": scale, "softcap": softcap, "softmax_precision": softmax_precision}

    def check() -> dict[str, Any]:
        if method not in _METHODS:
            raise RuntimeError(f"method: is {method!r}; allowed are {', '.join(map(repr, _METHODS))}")
        check_order(order)
        check_heads(Q, K, V, group)
        for name, tensor in (("Q", Q), ("K", K)):
            if order == "zigzag" and tensor.shape[2] % 2:
                raise RuntimeError(f"{name}: has {tensor.shape[2]} rows on this rank; zigzag order needs an even number")
        if method == "ulysses":
            _check_ulysses(Q.shape[1], K.shape[1], ranks)
        check_attributes(attributes, left_window_size, right_window_size)
        if attn_mask is not None:
            check_mask(attn_mask, Q, ranks * K.shape[2])
        if nonpad_kv_seqlen is not None:
            _check_lengths(nonpad_kv_seqlen, Q, ranks * K.shape[2])
        tensors = {"Q": Q, "K": K, "V": V, "attn_mask": attn_mask}
        windows = {"left_window_size": left_window_size, "right_window_size": right_window_size, "is_causal": bool(is_causal)}
        same = {"method": method, "order": order, "nonpad_kv_seqlen": values(nonpad_kv_seqlen), **attributes, **windows}
        return {name: shape_and_type(tensor) for name, tensor in tensors.items()} | same

    def attend() -> Tensor:
        if Q.numel() == 0 or K.numel() == 0:  # on every rank: sizes are the same
            return Q.new_zeros((*Q.shape[:3], V.shape[3]))
        kv_len = ranks * K.shape[2]
        lengths = None if nonpad_kv_seqlen is None else nonpad_kv_seqlen.clamp(0, kv_len)  # as the op on CUDA, but for the whole
        sight = Sight(ranks * Q.shape[2], kv_len, left_window_size, right_bound(is_causal, right_window_size), lengths is not None)
        split = Split(Q, K, V, attn_mask, lengths, sight, attributes, order, group, dist.get_rank(group), ranks)
        with expected_call():
            return _METHODS[method](split)

    agree(group, "context_parallel_attention", check)
    return forward_only(attend, Q, K, V, *(() if attn_mask is None else (attn_mask,)))


def _check_lengths(lengths: Tensor, Q: Tensor, kv_len: int) -> None:
    check_on("nonpad_kv_seqlen", lengths, Q)
    if lengths.shape != Q.shape[:1] or lengths.dtype != torch.int64:
        raise RuntimeError(f"nonpad_kv_seqlen: is {lengths.dtype} {list(lengths.shape)}; it must be int64 [{Q.shape[0]}]")
    if not lengths.is_cuda and bool(((lengths < 0) | (lengths > kv_len)).any()):
        raise RuntimeError(f"nonpad_kv_seqlen: is {lengths.tolist()}; allowed are 0 to {kv_len}, the rows of K on all ranks")


def _check_ulysses(q_heads: int, kv_heads: int, ranks: int) -> None:
    if q_heads % ranks:
        raise RuntimeError(f"method: 'ulysses' needs query heads that are a multiple of the {ranks} ranks, but Q has {q_heads}")
    if kv_heads and kv_heads % ranks and ranks % kv_heads:
        raise RuntimeError(f"method: 'ulysses' needs key heads that are a multiple or a divisor of the {ranks} ranks, but K has {kv_heads}")


# ---------------------------------------------------------------------------------------------------------------------
# The methods


def _by_allgather(split: Split) -> Tensor:
    """K and V whole on every rank. Rows are gathered as the outermost axis, which the op reads in place."""
    gathers = [start_gather(tensor.permute(2, 0, 1, 3), split.group) for tensor in (split.K, split.V)]
    keys, values = (_wait_for_rows(gather, split).permute(1, 2, 0, 3) for gather in gathers)
    parts = []
    done = 0
    for call in against_all_keys(split.queries(), split.sight):
        parts += [_empty(split, call.q_begin - done), split.run(torch.ops.onnx_attn.attention.default, keys, values, call)]
        done = call.q_end
    parts = [part for part in (*parts, _empty(split, split.Q.shape[2] - done)) if part.shape[2]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2) if parts else _empty(split, 0)


def _wait_for_rows(gather: tuple[Tensor, dist.Work], split: Split) -> Tensor:
    gathered, work = gather
    work.wait()
    return natural_order(gathered, split.ranks, split.order)


def _empty(split: Split, rows: int) -> Tensor:
    """The result of rows that see no key."""
    return split.Q.new_zeros((*split.Q.shape[:2], rows, split.V.shape[3]))


def _by_ulysses(split: Split) -> Tensor:
    """All rows of some heads in place of some rows of all heads: any feature of the op, as on one rank."""
    copies = max(1, split.ranks // split.K.shape[1])
    keys, values = (x if copies == 1 else x.repeat_interleave(copies, 1) for x in (split.K, split.V))
    Q, K, V = (_rows_for_heads(tensor, split) for tensor in (split.Q, keys, values))
    sight = split.sight
    Y: Tensor = torch.ops.onnx_attn.attention.default(
        Q,
        K,
        V,
        None if split.attn_mask is None else _mask_of_my_heads(split.attn_mask, split),
        nonpad_kv_seqlen=split.lengths,
        left_window_size=sight.left,
        right_window_size=sight.right,
        **split.attributes,
    )
    return _heads_for_rows(Y, split)


def _rows_for_heads(tensor: Tensor, split: Split) -> Tensor:
    """[B, H, l, D] on each rank to [B, H / n, L, D], a view whose outermost axis in memory is the rows."""
    sent = tensor.unflatten(1, (split.ranks, -1)).permute(1, 3, 0, 2, 4).contiguous()  # [n, l, B, H / n, D]
    received = _all_to_all(sent, split.group)
    return natural_order(received.flatten(0, 1), split.ranks, split.order).permute(1, 2, 0, 3)


def _all_to_all(sent: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Piece r of the outermost axis goes to rank r, and the pieces from the ranks come in their place."""
    received = torch.empty_like(sent)
    dist.all_to_all_single(as_bytes(received), as_bytes(sent), group=group)
    return received


def _heads_for_rows(Y: Tensor, split: Split) -> Tensor:
    """[B, H / n, L, D] on each rank to [B, H, l, D]."""
    sent = rank_order(Y.permute(2, 0, 1, 3), split.ranks, split.order).contiguous()  # [L, B, H / n, D]
    received = _all_to_all(sent, split.group)
    heads: Tensor = received.unflatten(0, (split.ranks, -1)).permute(2, 0, 3, 1, 4).flatten(1, 2)
    return heads


def _mask_of_my_heads(attn_mask: Tensor, split: Split) -> Tensor:
    """Every row of this rank's heads, from every head of this rank's rows."""
    mask = attn_mask.reshape((1,) * (4 - attn_mask.dim()) + attn_mask.shape)
    has_rows = mask.shape[2] == split.Q.shape[2]
    if not has_rows and mask.shape[1] == 1:
        return mask
    if mask.shape[1] > 1 and not has_rows:
        return mask.chunk(split.ranks, 1)[split.rank]
    if mask.shape[1] > 1:
        return _rows_for_heads(mask, split)
    return _wait_for_rows(start_gather(mask.permute(2, 0, 1, 3), split.group), split).permute(1, 2, 0, 3)


def _by_ring(split: Split) -> Tensor:
    """K and V pass from rank to rank; each step's transfer is started before its arithmetic, which hides it."""
    merged = Merged(split.Q, split.V.shape[3])
    steps = ring_calls(split.Q.shape[2], split.K.shape[2], split.rank, split.ranks, split.order, split.sight)
    held = [split.K.contiguous(), split.V.contiguous()]
    for step, calls in enumerate(steps):
        arriving, transfers = _pass_on(held, split) if step + 1 < len(steps) else (held, [])
        holder = (split.rank - step) % split.ranks
        for call in calls:
            Y, lse = split.run(torch.ops.onnx_attn.attention.lse, held[0], held[1], call, holder, return_lse=True)
            merged.add(Y, lse, call.q_begin, call.q_end)
        for transfer in transfers:
            transfer.wait()
        held = arriving
    return merged.result()


def _pass_on(held: Sequence[Tensor], split: Split) -> tuple[list[Tensor], list[dist.Work]]:
    """Starts sending what this rank holds to the next rank, and receiving what the previous one holds."""
    following, previous = (dist.get_global_rank(split.group, (split.rank + turn) % split.ranks) for turn in (1, -1))
    arriving = [torch.empty_like(tensor) for tensor in held]
    sends = [dist.P2POp(dist.isend, tensor, following, split.group) for tensor in held]
    receives = [dist.P2POp(dist.irecv, tensor, previous, split.group) for tensor in arriving]
    return arriving, dist.batch_isend_irecv(sends + receives)


_METHODS: dict[str, Callable[[Split], Tensor]] = {"allgather": _by_allgather, "ulysses": _by_ulysses, "ring": _by_ring}
