"""Bad arguments of the functions of torch_onnx_attn.distributed: an error that names the argument, before anything is sent or written."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from torch_onnx_attn.distributed import (
    context_parallel_attention,
    context_parallel_cached,
    gather_sequence,
    merge_over_ranks,
    shard_cache,
    shard_sequence,
)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """One rank: this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def some(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(shape, **options)


ROWS = {"Q": some(2, 4, 6, 8), "K": some(2, 2, 6, 8), "V": some(2, 2, 6, 8)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "star"}, r"method: is 'star'; allowed are 'allgather', 'ulysses', 'ring'"),
        ({"order": "random"}, r"order: is 'random'; allowed are 'contiguous' and 'zigzag'"),
        ({"order": "zigzag", "Q": some(2, 4, 5, 8)}, r"Q: has 5 rows on this rank; zigzag order needs an even number"),
        ({"Q": some(2, 6, 32)}, r"Q: has shape \[2, 6, 32\]; it must have 4 axes"),
        ({"Q": some(2, 4, 6, 7)}, r"K: has head size 8, but Q has 7"),
        ({"Q": some(3, 4, 6, 8)}, r"Q, K, V: have 3, 2 and 2 batch entries"),
        ({"Q": some(2, 5, 6, 8)}, r"Q: has 5 heads; they must be a multiple of the 2 of K"),
        ({"K": some(2, 2, 6, 8, dtype=torch.float16)}, r"K: is torch.float16, but Q is torch.float32"),
        ({"V": some(2, 2, 7, 8)}, r"V: has 2 heads and 7 rows, but K has 2 and 6"),
        ({"V": some(2, 2, 6, 8, dtype=torch.int32)}, r"V: is torch.int32; it must be float16"),
        ({"V": some(2, 2, 6, 8, device="meta")}, r"V: is on meta, but Q is on cpu"),
        ({"attn_mask": some(2, 3, 6, 6)}, r"attn_mask: has shape \[2, 3, 6, 6\]; it must align right to \[2, 4, 6, 6\]"),
        ({"attn_mask": some(6, 7)}, r"attn_mask: has shape \[6, 7\]"),
        ({"attn_mask": some(1, 1, 1, 6, 6)}, r"attn_mask: has shape \[1, 1, 1, 6, 6\]"),
        ({"nonpad_kv_seqlen": torch.tensor([6, 7])}, r"nonpad_kv_seqlen: is \[6, 7\]; allowed are 0 to 6"),
        ({"nonpad_kv_seqlen": torch.tensor([6, 6], dtype=torch.int32)}, r"nonpad_kv_seqlen: is torch.int32 \[2\]; it must be int64 \[2\]"),
        ({"left_window_size": -2}, r"left_window_size: is -2; it must be >= -1"),
        ({"scale": -1.0}, r"scale: is -1.0; it must be a finite float32 >= 0"),
        ({"scale": 1e39}, r"scale: is 1e\+39; it must be a finite float32"),
        ({"softcap": 1e-39}, r"softcap: is 1e-39; it must be >= 0 \(0 means no softcap\) and a finite, normal float32"),
        ({"Q": some(2, 4, 6, 8, dtype=torch.float8_e5m2)}, r"Q: is torch.float8_e5m2; it must be float16"),
        ({"K": None}, r"K: is None; it must be a tensor"),
        ({"V": some(2, 2, 6, 0)}, r"V: has head size 0; it must be at least 1"),
        ({"attn_mask": some(6, 6, dtype=torch.complex64)}, r"attn_mask: is torch.complex64; allowed are bool"),
        ({"attn_mask": some(6, 6, device="meta")}, r"attn_mask: is on meta, but Q is on cpu"),
        ({"nonpad_kv_seqlen": torch.zeros(2, dtype=torch.int64, device="meta")}, r"nonpad_kv_seqlen: is on meta, but Q is on cpu"),
        ({name: tensor.to("meta") for name, tensor in ROWS.items()}, r"Q: is on meta, but the group of mesh sends from"),
        ({"mesh": None}, r"mesh: is None; it must be a DeviceMesh with one dimension, or a process group"),
        ({"mesh": "context"}, r"mesh: is 'context'; it must be a DeviceMesh"),
        ({"mesh": dist.GroupMember.NON_GROUP_MEMBER}, r"mesh: is -100; it must be .* a process group that this rank is in"),
        ({"softcap": float("inf")}, r"softcap: is inf"),
        ({"softmax_precision": 7}, r"softmax_precision: is 7; allowed are 1, 10, 11 and 16"),
    ],
)
def test_context_parallel_attention(mesh: DeviceMesh, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        context_parallel_attention(**(ROWS | {"mesh": mesh} | changes))


def test_dtensors_and_meshes(mesh: DeviceMesh) -> None:
    with pytest.raises(RuntimeError, match=r"K: is a DTensor; give this rank's part as a plain tensor"):
        context_parallel_attention(ROWS["Q"], distribute_tensor(ROWS["K"], mesh, [Shard(2)]), ROWS["V"], mesh=mesh)
    two = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "context"))
    with pytest.raises(RuntimeError, match=r"mesh: has 2 dimensions; name the one that holds the sequence"):
        context_parallel_attention(**ROWS, mesh=two)
    assert context_parallel_attention(**ROWS, mesh=two["context"]).shape == ROWS["Q"].shape
    assert context_parallel_attention(**ROWS, mesh=mesh.get_group()).shape == ROWS["Q"].shape


KEYS = some(2, 2, 64, 8)
STEP = {"Q": some(2, 4, 1, 8), "K": some(2, 2, 1, 8) + 1, "V": some(2, 2, 1, 8)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 5}, r"block_size: is 5; it must be positive and divide the 64 rows of key_cache"),
        ({"block_size": 0}, r"block_size: is 0"),
        ({"value_cache": some(2, 2, 32, 8)}, r"value_cache: has 32 rows, but key_cache has 64"),
        ({"key_cache": some(2, 64, 16)}, r"key_cache: is \[2, 64, 16\] on cpu; it must be \[batch, heads, rows, head size\]"),
        ({"key_cache": some(2, 1, 64, 8)}, r"key_cache: is torch.float32 \[2, 1, 64, 8\], but K is torch.float32 \[2, 2, 1, 8\]"),
        ({"Q": some(2, 4, 2, 8)}, r"Q: has 2 rows, but K has 1; they must be the same new rows"),
        ({"cache_lengths": torch.tensor([3, 64])}, r"cache_lengths: is \[3, 64\]; with 1 new rows they must be 0 to 63"),
        ({"cache_lengths": torch.tensor([-1, 3])}, r"cache_lengths: is \[-1, 3\]"),
        ({"cache_lengths": torch.tensor([1.0, 3.0])}, r"cache_lengths: is torch.float32 \[2\]; it must be int64 or int32 \[2\]"),
        ({"attn_mask": some(65)}, r"attn_mask: has shape \[65\]"),
        ({"right_window_size": -3}, r"right_window_size: is -3"),
        ({"key_cache": some(2, 1, 64, 8).expand(2, 2, 64, 8)}, r"key_cache: is written in place, but an axis is expanded"),
        ({"value_cache": KEYS}, r"value_cache: overlaps key_cache, which is written in place"),
        ({"K": KEYS[:, :, 5:6]}, r"K: overlaps key_cache, which is written in place"),
        ({"value_cache": some(2, 2, 64, 8, requires_grad=True)}, r"value_cache: requires a gradient, but is written in place"),
        ({"cache_lengths": torch.zeros(2, dtype=torch.int64, device="meta")}, r"cache_lengths: is on meta, but Q is on cpu"),
        ({"cache_lengths": None}, r"cache_lengths: is None; it must be a tensor"),
        ({"mesh": None}, r"mesh: is None"),
    ],
)
def test_context_parallel_cached(mesh: DeviceMesh, changes: dict[str, Any], message: str) -> None:
    caches = {"key_cache": KEYS, "value_cache": some(2, 2, 64, 8), "cache_lengths": torch.tensor([3, 5])}
    with pytest.raises(RuntimeError, match=message):
        context_parallel_cached(**(STEP | caches | {"mesh": mesh} | changes))
    assert not bool(caches["key_cache"].any()), "something was written"


def test_sequences_and_caches(mesh: DeviceMesh) -> None:
    with pytest.raises(RuntimeError, match=r"tensor: axis -2 has 5 rows; zigzag order on 1 ranks needs a multiple of 2"):
        shard_sequence(some(5, 2), mesh, order="zigzag")
    with pytest.raises(RuntimeError, match=r"tensor: axis 0 has 5 rows; zigzag order needs an even number"):
        gather_sequence(some(5, 2), mesh, axis=0, order="zigzag")
    with pytest.raises(RuntimeError, match=r"cache: has 60 rows; it must be a multiple of 1 ranks times block_size = 64"):
        shard_cache(some(2, 2, 60, 8), mesh)
    with pytest.raises(RuntimeError, match=r"cache: has shape \[60, 8\]; it must have 4 axes"):
        shard_cache(some(60, 8), mesh)
    with pytest.raises(RuntimeError, match=r"block_size: is 0; it must be positive"):
        shard_cache(some(2, 2, 64, 8), mesh, block_size=0)
    for function in (shard_sequence, gather_sequence):
        with pytest.raises(RuntimeError, match=r"axis: is 2; a tensor of shape \[4, 2\] has axes -2 to 1"):
            function(some(4, 2), mesh, axis=2)
        with pytest.raises(RuntimeError, match=r"tensor: is a DTensor"):
            function(distribute_tensor(some(4, 2), mesh, [Shard(0)]), mesh)
        with pytest.raises(RuntimeError, match=r"mesh: is None"):
            function(some(4, 2), None)


@pytest.mark.parametrize(
    ("Y", "lse", "message"),
    [
        (some(2, 4, 8), some(2, 4), r"Y: is torch.float32 \[2, 4, 8\]; it must be floating, \[batch, heads, rows, head size\]"),
        (some(2, 4, 3, 8), some(2, 4, 3, 1), r"lse: is torch.float32 \[2, 4, 3, 1\] on cpu; it must be torch.float32 \[2, 4, 3\] on cpu"),
        (some(2, 4, 3, 8), some(2, 4, 3, dtype=torch.float64), r"lse: is torch.float64"),
    ],
)
def test_merge_over_ranks(mesh: DeviceMesh, Y: torch.Tensor, lse: torch.Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        merge_over_ranks(Y, lse, mesh)


def test_without_a_process_group() -> None:
    """In a process that never called init_process_group: the ops work, and what needs ranks says so."""
    code = """
import torch, torch_onnx_attn, torch_onnx_attn.distributed as split
x = torch.ones(1, 2, 4, 8)
assert torch_onnx_attn.attention(x, x, x).Y.shape == x.shape
try:
    split.context_parallel_attention(x, x, x, mesh=torch.distributed.group.WORLD)
except RuntimeError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=1200, check=False)
    assert run.stdout.startswith("mesh: is None; it must be a DeviceMesh"), run.stdout + run.stderr
