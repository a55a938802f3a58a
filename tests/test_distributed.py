"""Contexts and caches split over gloo processes on this machine, against the whole in float64."""

from __future__ import annotations

from collections.abc import Iterator

import distributed_cases
import pytest
from distributed_cases import DECODING, ROWS, Decoding, Rows
from distributed_world import World, world

RANKS = 4  # the pairs of the two-rank checks run twice, side by side


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    with world(RANKS) as made:
        yield made


@pytest.mark.parametrize("given", ROWS, ids=str)
def test_rows(ranks: World, given: Rows) -> None:
    ranks.run("distributed_cases", "check_rows", given)


@pytest.mark.parametrize("given", DECODING, ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_decoding(ranks: World, given: Decoding, size: int) -> None:
    ranks.run("distributed_cases", "check_decoding", distributed_cases.dataclasses.replace(given, ranks=size))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_sequence_orders(ranks: World, size: int) -> None:
    ranks.run("distributed_cases", "check_sequence_orders", size)


@pytest.mark.parametrize("size", [2, 4])
def test_decoding_after_prefill(ranks: World, size: int) -> None:
    ranks.run("distributed_cases", "check_decoding_after_prefill", size)


def test_values_that_are_not_finite(ranks: World) -> None:
    ranks.run("distributed_cases", "check_values_that_are_not_finite")


def test_forward_only(ranks: World) -> None:
    ranks.run("distributed_cases", "check_forward_only")
