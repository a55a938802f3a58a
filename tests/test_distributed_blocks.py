"""The plan of a split attention, cell by cell: every visible pair of row and key is in exactly one call, and no other pair is in any."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from torch_onnx_attn.distributed.blocks import Call, Sight, against_all_keys, against_some_keys
from torch_onnx_attn.distributed.decode import positions_of
from torch_onnx_attn.distributed.sequence import Segment, segments

ROOT = Path(__file__).resolve().parent.parent
WINDOWS = list(itertools.product((-1, 0, 1, 3, 9, 40), repeat=2))


def positions(held: Sequence[Segment]) -> Tensor:
    return torch.cat([torch.arange(segment.start, segment.start + segment.rows) for segment in held])


def visible(sight: Sight, rows: Tensor, keys: Tensor, length: int | None) -> Tensor:
    """The definition: bool [rows, keys] for one batch entry."""
    distance = keys - (rows[:, None] + (0 if length is None else length - sight.q_len))
    seen = (keys < (sight.kv_len if length is None else length)).expand(distance.shape)
    seen = seen & (distance >= -sight.left) if sight.left >= 0 else seen
    return seen & (distance <= sight.right) if sight.right >= 0 else seen


def covered(calls: Sequence[Call], rows: int, keys: int, length: int | None) -> Tensor:
    """How many calls let each local row see each local key, by the op's rule on each call alone."""
    count = torch.zeros(rows, keys, dtype=torch.int64)
    for call in calls:
        q_len, kv_len = call.q_end - call.q_begin, call.k_end - call.k_begin
        assert 0 <= call.q_begin < call.q_end <= rows and 0 <= call.k_begin < call.k_end <= keys
        limit, offset = kv_len, 0
        if call.length_shift is not None:
            assert length is not None
            limit = min(max(length - call.length_shift, 0), kv_len)
            offset = limit - q_len
        local = Sight(q_len, kv_len, call.left, call.right, False)
        own = torch.arange(q_len) + offset
        count[call.q_begin : call.q_end, call.k_begin : call.k_end] += visible(local, own, torch.arange(kv_len), None) & (
            torch.arange(kv_len) < limit
        )
    return count


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("q_rows", "k_rows"), [(4, 4), (4, 6), (6, 2), (2, 2)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_pair_is_in_one_call(ranks: int, q_rows: int, k_rows: int, order: str) -> None:
    q_len, kv_len = ranks * q_rows, ranks * k_rows
    for left, right in WINDOWS:
        plain = Sight(q_len, kv_len, left, right, False)
        counted = Sight(q_len, kv_len, left, right, True)
        for rank in range(ranks):
            queries = segments(q_rows, rank, ranks, order)
            rows, every = positions(queries), torch.arange(kv_len)
            found = covered(against_all_keys(queries, plain), q_rows, kv_len, None)
            assert torch.equal(found, visible(plain, rows, every, None).long()), (left, right, rank)
            for length in range(kv_len + 1):
                found = covered(against_all_keys(queries, counted), q_rows, kv_len, length)
                assert torch.equal(found, visible(counted, rows, every, length).long()), (left, right, rank, length)
            for holder in range(ranks):
                keys = segments(k_rows, holder, ranks, order)
                found = covered(against_some_keys(queries, keys, plain), q_rows, k_rows, None)
                assert torch.equal(found, visible(plain, rows, positions(keys), None).long()), (left, right, rank, holder)


def test_balanced_causal_rings_have_few_and_equal_calls() -> None:
    """In zigzag order every rank has one call a step, each over as many pairs as the others'."""
    rows, ranks = 8, 4
    sight = Sight(rows * ranks, rows * ranks, -1, 0, False)
    for step in range(ranks):
        work = []
        for rank in range(ranks):
            queries, keys = segments(rows, rank, ranks, "zigzag"), segments(rows, (rank - step) % ranks, ranks, "zigzag")
            calls = against_some_keys(queries, keys, sight)
            assert len(calls) == 1
            work.append(int(covered(calls, rows, rows, None).sum()))
        assert len(set(work)) == 1


def test_positions_of_a_split_cache() -> None:
    for ranks, block_size, blocks in ((1, 4, 3), (2, 1, 5), (4, 3, 2)):
        rows = torch.arange(block_size * blocks)
        held = [positions_of(rows, rank, ranks, block_size) for rank in range(ranks)]
        assert sorted(torch.cat(held).tolist()) == list(range(ranks * len(rows)))
        assert all(bool((part.diff() > 0).all()) for part in held)
        assert held[0][:block_size].tolist() == list(range(block_size))


@pytest.mark.slow
def test_the_benchmark_on_two_cpu_processes(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "distributed.py"), "--device", "cpu", "--no-checks", "--json", str(path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=environment, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads(path.read_text())
    assert {"gpu", "torch", "commit", "gpus", "links", "lines", "checks"} <= set(result)
    names = {line["name"] for line in result["lines"]}
    assert {"prefill_heads_128", "prefill_ring_zigzag_128", "decode_cache_1024"} <= names
    assert all(line["two_ms"] > 0 and line["ratio"] > 0 for line in result["lines"])
