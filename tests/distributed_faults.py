"""What a rank does when another one fails. Run inside a world."""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch
import torch.distributed as dist
from distributed_world import Ranks, message

from torch_onnx_attn.distributed import context_parallel_attention, context_parallel_cached, gather_sequence, merge_over_ranks

TIMEOUT_S = 2.0


def fresh_group(ranks: Ranks) -> dist.ProcessGroup:
    """A group that a check may break. All ranks hold it on return, and only then is its timeout short: connecting takes what it takes."""
    group = dist.new_group()
    ranks.tell(f"holds group {group.group_name}")
    ranks.hear(f"holds group {group.group_name}", range(ranks.size))
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=TIMEOUT_S), group)
    return group


def call(method: str, group: dist.ProcessGroup, width: int = 8, device: str = "cpu") -> torch.Tensor:
    Q, K, V = (torch.ones(shape, device=device) for shape in ((1, 4, 6, width), (1, 2, 6, 8), (1, 2, 6, 8)))
    if method == "decode":
        cache, lengths = torch.ones(1, 2, 64, 8, device=device), torch.tensor([9], device=device)
        return context_parallel_cached(Q[:, :, :1], K[:, :, :1], V[:, :, :1], cache, cache.clone(), lengths, mesh=group)
    return context_parallel_attention(Q, K, V, mesh=group, method=method, is_causal=True)


def outcome(method: str, group: dist.ProcessGroup, width: int = 8, device: str = "cpu") -> str:
    """The error's text; empty if there was none."""
    try:
        call(method, group, width, device)
        if device == "cuda":
            torch.cuda.synchronize()
    except RuntimeError as error:
        return f"{error}"
    return ""


def bad_argument(ranks: Ranks, method: str) -> str:
    """The last rank's head size is wrong: its own call raises."""
    group = dist.group.WORLD
    assert group is not None
    return outcome(method, group, 8 if ranks.rank + 1 < ranks.size else 7)


def disagreement(ranks: Ranks) -> list[str]:
    """What this rank is told where the last rank was given something else."""
    group, told = dist.group.WORLD, []
    assert group is not None
    given: dict[str, Any] = {"Q": torch.ones(1, 4, 6, 8), "K": torch.ones(1, 2, 6, 8), "V": torch.ones(1, 2, 6, 8)}
    caches = {"key_cache": torch.zeros(1, 2, 64, 8), "value_cache": torch.zeros(1, 2, 64, 8), "cache_lengths": torch.tensor([9])}
    step = {name: tensor[:, :, :1] for name, tensor in given.items()} | caches
    for function, usual, different in (
        (context_parallel_attention, given, {"Q": torch.ones(1, 4, 8, 8)}),
        (context_parallel_attention, given | {"method": "ring"}, {"K": torch.ones(1, 2, 4, 8), "V": torch.ones(1, 2, 4, 8)}),
        (context_parallel_attention, given | {"method": "ring"}, {"V": torch.ones(1, 2, 6, 8, dtype=torch.float64)}),
        (context_parallel_attention, given | {"method": "ring"}, {"method": "ulysses"}),
        (context_parallel_attention, given, {"order": "zigzag"}),
        (context_parallel_attention, given, {"is_causal": True}),
        (context_parallel_attention, given, {"attn_mask": torch.ones(6, 12)}),
        (context_parallel_attention, given, {"nonpad_kv_seqlen": torch.tensor([7])}),
        (context_parallel_attention, given, {"K": None}),
        (context_parallel_cached, step, {"cache_lengths": torch.tensor([10])}),
        (context_parallel_cached, step, {"block_size": 32}),
        (context_parallel_cached, step, {"Q": torch.ones(1, 6, 1, 8)}),
        (context_parallel_cached, step, {"softcap": -1.0}),
        (gather_sequence, {"tensor": torch.ones(4, 2)}, {"tensor": torch.ones(6, 2)}),
        (merge_over_ranks, {"Y": torch.ones(1, 4, 1, 8), "lse": torch.ones(1, 4, 1)}, {"lse": torch.ones(1, 4, 1, 1)}),
    ):
        changed: dict[str, Any] = different if ranks.rank + 1 == ranks.size else {}
        told.append(message(lambda call=function, given=usual | changed: call(**given, mesh=group)))
    assert not bool(caches["key_cache"].any()), "something was written"
    return told


def stall(ranks: Ranks, method: str) -> str:
    """The last rank comes when the others have given up."""
    group = fresh_group(ranks)
    word, last = f"gave up group {group.group_name}", ranks.size - 1
    if ranks.rank == last:
        ranks.hear(word, range(last))
    told = outcome(method, group)
    ranks.tell(word)
    return told


def death(ranks: Ranks, method: str) -> str:
    """The last rank's process ends."""
    group = fresh_group(ranks)
    if ranks.rank + 1 == ranks.size:
        os._exit(1)
    return outcome(method, group)


def bad_argument_on_cuda(ranks: Ranks, method: str) -> str:
    """As bad_argument, after a call that is right. NCCL may end the processes that wait instead of raising in them."""
    group = dist.group.WORLD
    assert group is not None
    call(method, group, device="cuda")
    torch.cuda.synchronize()
    return outcome(method, group, 8 if ranks.rank + 1 < ranks.size else 7, "cuda")
