"""Sharding rules on gloo processes of this machine: every overload in every way, exact, with nothing communicated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cases import Case, MhaCase
from distributed_world import World, world

CHECKS = "distributed_dtensor"
WIDE = {"batch": 4, "q_heads": 8, "kv_heads": 4}
ATTENTION = {
    "default": Case(**WIDE),
    "causal": Case(**WIDE, is_causal=True, q_len=9),
    "softcap, window": Case(**WIDE, softcap=3.0, scale=0.2, left_window_size=4, right_window_size=1),
    "3-D": Case(**WIDE, layout="3d", is_causal=True),
    "3-D kv": Case(**WIDE, layout="3d", past=3, v_head_size=8),
    "strides": Case(**WIDE, layout="bshd"),
    "bool mask": Case(**WIDE, mask="bool"),
    "mask of heads": Case(**WIDE, mask="same", mask_axes="1hqk"),
    "mask rank 2": Case(**WIDE, mask="bool", mask_axes="qk", is_causal=True),
    "mask of batches": Case(**WIDE, mask="same", mask_axes="b1qk", mask_columns=5),
    "lengths": Case(**WIDE, lengths="ragged", is_causal=True, q_len=4),
    "mask and lengths": Case(**WIDE, lengths="ragged", mask="bool"),
    "kv": Case(**WIDE, past=4, is_causal=True),
    "qk": Case(**WIDE, qk_matmul_output_mode=1),
    "qk lengths": Case(**WIDE, qk_matmul_output_mode=3, lengths="ragged"),
    "kv_qk": Case(**WIDE, past=4, qk_matmul_output_mode=2, mask="bool"),
    "lse": Case(**WIDE, lse=True, lengths="ragged"),
    "3-D lse": Case(**WIDE, lse=True, layout="3d"),
    "uneven batch": Case(batch=3, q_heads=8, kv_heads=4, past=2, mask="bool"),
    "multi-query": Case(batch=4, q_heads=8, kv_heads=1, is_causal=True),
    "multi-query kv": Case(batch=4, q_heads=8, kv_heads=1, past=3),
    "multi-query 3-D": Case(batch=4, q_heads=8, kv_heads=1, layout="3d", lse=True),
    "float64": Case(**WIDE, dtype=torch.float64),
    "bfloat16": Case(**WIDE, dtype=torch.bfloat16, head_size=64),
}
BOTH = {"batch": 4, "num_heads": 8}
MHA = {
    "default": MhaCase(**BOTH),
    "bias": MhaCase(**BOTH, bias=True, v_head_size=8),
    "packed QKV": MhaCase(**BOTH, layout="packed_qkv", q_len=9, bias=True),
    "packed KV": MhaCase(**BOTH, layout="packed_kv"),
    "split heads": MhaCase(**BOTH, layout="bnsh", bias=True),
    "lengths": MhaCase(**BOTH, mask="lengths"),
    "lengths and starts": MhaCase(**BOTH, mask="lengths_starts"),
    "mask of keys": MhaCase(**BOTH, mask="keys"),
    "mask of rows": MhaCase(**BOTH, mask="rows", unidirectional=True),
    "attention bias": MhaCase(**BOTH, attention_bias="bh", qk=True),
    "attention bias of heads": MhaCase(**BOTH, attention_bias="h"),
    "kv": MhaCase(**BOTH, past=3, bias=True),
    "kv_qk": MhaCase(**BOTH, past=3, qk=True, attention_bias="b"),
    "shared": MhaCase(**BOTH, q_len=1, kv_len=1, past=5, capacity=9),
    "beams": MhaCase(batch=8, num_heads=8, q_len=1, kv_len=1, past=5, capacity=9, beams=2),
    "uneven batch": MhaCase(batch=3, num_heads=8, mask="lengths_starts", bias=True),
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    with world(4) as made:
        yield made


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("way", ["batch", "heads", "whole"])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(ranks: World, name: str, way: str, size: int) -> None:
    ranks.run(CHECKS, "check_attention", size, ATTENTION[name], way)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("way", ["batch", "heads"])
@pytest.mark.parametrize("name", MHA)
def test_mha(ranks: World, name: str, way: str, size: int) -> None:
    ranks.run(CHECKS, "check_mha", size, MHA[name], way)


@pytest.mark.parametrize("way", ["batch", "heads"])
def test_shared_functional(ranks: World, way: str) -> None:
    ranks.run(CHECKS, "check_shared_functional", 4, way)


def test_backward(ranks: World) -> None:
    ranks.run(CHECKS, "check_backward")


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("way", ["batch", "heads"])
def test_attention_cached(ranks: World, way: str, kv_heads: int) -> None:
    ranks.run(CHECKS, "check_cached", 2, way, kv_heads)


@pytest.mark.parametrize(("axis", "sharded"), [(2, 0), (2, 1), (2, 3), (1, 2), (3, 2)])
def test_tensor_scatter(ranks: World, axis: int, sharded: int) -> None:
    ranks.run(CHECKS, "check_scatter", 4, axis, sharded)


@pytest.mark.parametrize("size", [2, 4])
def test_what_no_rule_splits_is_gathered(ranks: World, size: int) -> None:
    ranks.run(CHECKS, "check_moved", size)
    ranks.run(CHECKS, "check_valid_kv_length", size)


def test_flags_do_not_stick(ranks: World) -> None:
    ranks.run(CHECKS, "check_flags_do_not_stick")


def test_two_mesh_dimensions(ranks: World) -> None:
    ranks.run(CHECKS, "check_two_dimensions")


def test_errors(ranks: World) -> None:
    ranks.run(CHECKS, "check_errors")
    ranks.run(CHECKS, "check_ranks_outside")


def test_sizes_that_disagree(ranks: World) -> None:
    ranks.run(CHECKS, "check_sizes_that_disagree")


def test_partial(ranks: World) -> None:
    ranks.run(CHECKS, "check_partial")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("kind", ["attention", "mha"])
def test_tensor_parallel(ranks: World, kind: str, local: bool, compiled: bool) -> None:
    ranks.run(CHECKS, "check_tensor_parallel", 2, kind, local, compiled)


def test_a_whole_bias_beside_split_heads_is_an_error(ranks: World) -> None:
    ranks.run(CHECKS, "check_whole_bias_beside_split_heads")


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="a plain tensor does not say that it is a piece of a DTensor: Q, K and V cut alike are a legal call with narrower heads",
)
def test_head_counts_of_the_whole_raise(ranks: World) -> None:
    ranks.run(CHECKS, "check_head_counts_of_the_whole")


def test_pieces_of_a_hidden_axis(ranks: World) -> None:
    ranks.run(CHECKS, "check_split_hidden")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["attention", "mha with bias"])
def test_fsdp(ranks: World, kind: str, compiled: bool) -> None:
    ranks.run(CHECKS, "check_fsdp", kind, compiled)


def test_compiled_operators(ranks: World) -> None:
    ranks.run(CHECKS, "check_compiled_operators")


def test_export(ranks: World) -> None:
    ranks.run(CHECKS, "check_export", 2)
