"""A rank that fails or stalls is an error on every rank within the group's timeout: no hang, no partial result."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from distributed_faults import TIMEOUT_S
from distributed_world import World, world

METHODS = ("allgather", "ulysses", "ring", "decode")


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    with world(2) as made:
        yield made


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_that_raises(pair: World, method: str) -> None:
    other, own = pair.run("distributed_faults", "bad_argument", method)
    assert own == "K: has head size 8, but Q has 7"
    assert other == f"{own} (on rank 1 of the group)", "the other rank hears of it by itself, not by a timeout"


def test_ranks_that_disagree(pair: World) -> None:
    first, last = pair.run("distributed_faults", "disagreement")
    names = ("Q", "K", "V", "method", "order", "is_causal", "attn_mask", "nonpad_kv_seqlen", "K")
    names += ("cache_lengths", "block_size", "Q", "softcap", "tensor", "lse")
    for name, here, there in zip(names, first, last, strict=True):
        assert here.startswith(f"{name}: is "), here
        assert here == there or here == f"{there} (on rank 1 of the group)"


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_that_stalls(pair: World, method: str) -> None:
    other, stalled = pair.run("distributed_faults", "stall", method)
    assert f"{TIMEOUT_S * 1000:.0f}ms" in other, other
    assert stalled, "the rank that came late got a result that the others do not have"


def test_a_rank_that_dies() -> None:
    with world(2) as made:
        survivor, dead = made.results("distributed_faults", "death", "ring")
    assert dead.failure == "its process ended with exit code 1"
    assert survivor.result(), "a result without the other rank"
