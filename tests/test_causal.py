"""Causality: query i sees key j where j <= i + offset. The offset is the past length, or nonpad_kv_seqlen - q_len, or 0."""

from __future__ import annotations

import pytest
import torch
from cases import FLOAT_DTYPES, Case, check_attention, make_inputs
from visibility import probe, seen

attention = torch.ops.onnx_attn.attention


def test_without_a_cache_counts_from_the_top_left(device: str) -> None:
    assert seen(attention(**probe(3, 5, device=device), is_causal=True)) == [["#....", "##...", "###.."]]
    assert seen(attention(**probe(4, 2, device=device), is_causal=True)) == [["#.", "##", "##", "##"]]
    assert seen(attention(**probe(1, 4, device=device), is_causal=True)) == [["#..."]]


def test_past_moves_the_diagonal(device: str) -> None:
    Y = attention.kv(**probe(2, 2, past=3, device=device), is_causal=True)[0]
    assert seen(Y) == [["####.", "#####"]]
    Y = attention.kv(**probe(2, 4, past=1, device=device), is_causal=True)[0]
    assert seen(Y) == [["##...", "###.."]]


def test_lengths_move_the_diagonal_of_each_entry(device: str) -> None:
    lengths = torch.tensor([4, 8, 2, 0], device=device)
    Y = attention(**probe(4, 8, batch=4, device=device), is_causal=True, nonpad_kv_seqlen=lengths)
    assert seen(Y) == [
        ["#.......", "##......", "###.....", "####...."],  # the two pictures of the ONNX text
        ["#####...", "######..", "#######.", "########"],
        ["........", "........", "#.......", "##......"],  # more queries than keys: the first rows are empty
        ["........", "........", "........", "........"],
    ]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("q_len", "kv_len"), [(1, 1), (1, 70), (70, 1), (127, 127), (128, 128), (129, 129), (130, 65), (65, 130), (200, 300)]
)
def test_lengths_around_tiles(dtype: torch.dtype, q_len: int, kv_len: int, device: str) -> None:
    check_attention(Case(dtype=dtype, q_len=q_len, kv_len=kv_len, head_size=32, is_causal=True, batch=1), device)


@pytest.mark.parametrize("past", [0, 1, 63, 64, 130])
@pytest.mark.parametrize("q_len", [1, 2, 64, 66])
def test_past(past: int, q_len: int, device: str) -> None:
    check_attention(Case(dtype=torch.float16, q_len=q_len, kv_len=q_len, past=past, head_size=32, is_causal=True), device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("q_len", [1, 3, 64, 129])
def test_ragged_lengths(dtype: torch.dtype, q_len: int, device: str) -> None:
    check_attention(Case(dtype=dtype, batch=5, q_len=q_len, kv_len=140, head_size=32, is_causal=True, lengths="ragged"), device)


@pytest.mark.parametrize("mask", ["bool", "same", "int64"])
def test_composes_with_a_mask(mask: str, device: str) -> None:
    check_attention(Case(q_len=66, kv_len=66, mask=mask, is_causal=True), device)
    check_attention(Case(q_len=4, kv_len=6, mask=mask, mask_axes="hqk", is_causal=True, past=3), device)
    check_attention(Case(q_len=4, kv_len=66, batch=5, mask=mask, mask_axes="b1qk", is_causal=True, lengths="ragged"), device)


def test_intersection_with_a_mask_may_be_empty(device: str) -> None:
    """Row 0 may see key 0 only, and the mask takes it away: zeros, although neither excludes everything alone."""
    mask = torch.tensor([[False, True, True]], device=device).expand(3, 3)
    assert seen(attention(**probe(3, 3, device=device), attn_mask=mask, is_causal=True)) == [["...", ".#.", ".##"]]


def test_is_the_triangular_mask(device: str) -> None:
    inputs = make_inputs(Case(q_len=70, kv_len=70, head_size=64), device)
    mask = torch.ones(70, 70, dtype=torch.bool, device=device).tril()
    torch.testing.assert_close(attention(**inputs, is_causal=True), attention(**inputs, attn_mask=mask), atol=5e-6, rtol=5e-6)


def test_future_values_do_not_matter(device: str) -> None:
    """What lies after the diagonal may change without a bit of the result changing."""
    case = Case(dtype=torch.float16, q_len=96, kv_len=96, head_size=64, is_causal=True)
    inputs = make_inputs(case, device)
    before = attention(**inputs, is_causal=True)[:, :, :50]
    inputs["K"][:, :, 50:], inputs["V"][:, :, 50:] = 7.0, -3.0
    assert torch.equal(attention(**inputs, is_causal=True)[:, :, :50], before)
