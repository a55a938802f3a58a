"""A rank that fails or stalls is an error on every rank within the group's timeout: no hang, no partial result."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from distributed_faults import STALL_S, TIMEOUT_S
from distributed_world import World, world

METHODS = ("allgather", "ulysses", "ring", "decode")
SLACK_S = 20.0  # for a loaded machine; far below the world's own timeout


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    with world(2, timeout_s=120) as made:
        yield made


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_that_raises(pair: World, method: str) -> None:
    (other, waited), (own, _) = pair.run("distributed_faults", "bad_argument", method)
    assert "head size" in own
    assert other and waited < TIMEOUT_S + SLACK_S


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_that_stalls(pair: World, method: str) -> None:
    (other, waited), (stalled, _) = pair.run("distributed_faults", "stall", method)
    assert other and waited < STALL_S + SLACK_S
    assert stalled, "the rank that came late got a result that the others do not have"


def test_a_rank_that_dies() -> None:
    with world(2, timeout_s=120) as made:
        found = made.results("distributed_faults", "death", "ring")
    assert found[1] is None and found[0] is not None
    ok, (other, waited) = found[0]
    assert ok and other and waited < TIMEOUT_S + SLACK_S
