"""Sliding windows: query i stands at p = i + offset and sees p - left <= j <= p + right; -1 leaves a side open."""

from __future__ import annotations

import pytest
import torch
from cases import FLOAT_DTYPES, Case, check_attention, make_inputs
from visibility import probe, seen

attention = torch.ops.onnx_attn.attention


def test_picture_of_the_onnx_text(device: str) -> None:
    Y = attention(**probe(4, 6, device=device), left_window_size=2, right_window_size=1)
    assert seen(Y) == [["##....", "###...", "####..", ".####."]]


@pytest.mark.parametrize(
    ("left", "right", "picture"),
    [
        (0, -1, ["####", ".###", "..##", "...#"]),
        (-1, 0, ["#...", "##..", "###.", "####"]),
        (0, 0, ["#...", ".#..", "..#.", "...#"]),
        (-1, 1, ["##..", "###.", "####", "####"]),
        (1, -1, ["####", "####", ".###", "..##"]),
        (99, 99, ["####"] * 4),
    ],
)
def test_each_side(left: int, right: int, picture: list[str], device: str) -> None:
    assert seen(attention(**probe(4, 4, device=device), left_window_size=left, right_window_size=right)) == [picture]


def test_causal_closes_the_right_side(device: str) -> None:
    Y = attention(**probe(4, 4, device=device), left_window_size=1, right_window_size=2, is_causal=True)
    assert seen(Y) == [["#...", "##..", ".##.", "..##"]]


def test_moves_with_the_past(device: str) -> None:
    Y = attention.kv(**probe(2, 2, past=4, device=device), left_window_size=2, right_window_size=0)[0]
    assert seen(Y) == [["..###.", "...###"]]


def test_moves_with_the_lengths(device: str) -> None:
    lengths = torch.tensor([6, 3, 1, 0], device=device)
    Y = attention(**probe(2, 6, batch=4, device=device), left_window_size=1, right_window_size=0, nonpad_kv_seqlen=lengths)
    assert seen(Y) == [
        ["...##.", "....##"],
        ["##....", ".##..."],
        ["......", "#....."],  # row 0 stands at -1
        ["......", "......"],
    ]


def test_window_beyond_the_keys_is_empty(device: str) -> None:
    Y = attention(**probe(5, 2, device=device), left_window_size=1, right_window_size=0)
    assert seen(Y) == [["#.", "##", ".#", "..", ".."]]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize(("left", "right"), [(0, 0), (5, -1), (-1, 5), (63, 0), (64, 64), (65, 1), (127, 128), (200, 0)])
def test_sizes_around_tiles(dtype: torch.dtype, left: int, right: int, device: str) -> None:
    check_attention(Case(dtype=dtype, batch=1, q_len=140, kv_len=200, head_size=32, left_window_size=left, right_window_size=right), device)


@pytest.mark.parametrize("q_len", [1, 2, 65])
@pytest.mark.parametrize("is_causal", [False, True])
def test_with_cache(q_len: int, is_causal: bool, device: str) -> None:
    window = {"left_window_size": 70, "right_window_size": 3, "is_causal": is_causal, "dtype": torch.bfloat16, "head_size": 32}
    check_attention(Case(q_len=q_len, kv_len=q_len, past=150, **window), device)
    check_attention(Case(batch=5, q_len=q_len, kv_len=200, lengths="ragged", **window), device)


@pytest.mark.parametrize("mask", ["bool", "float32"])
def test_with_mask(mask: str, device: str) -> None:
    check_attention(Case(batch=5, q_len=20, kv_len=90, left_window_size=30, right_window_size=4, mask=mask, lengths="ragged"), device)


def test_left_of_q_len_minus_one_is_plain_causal(device: str) -> None:
    inputs = make_inputs(Case(q_len=33, kv_len=33), device)
    windowed = attention(**inputs, is_causal=True, left_window_size=32)
    torch.testing.assert_close(windowed, attention(**inputs, is_causal=True), atol=5e-6, rtol=5e-6)


def test_huge_windows_do_not_overflow(device: str) -> None:
    inputs = make_inputs(Case(q_len=9, kv_len=9), device)
    huge = attention(**inputs, left_window_size=2**63 - 1, right_window_size=2**63 - 1)
    torch.testing.assert_close(huge, attention(**inputs, left_window_size=9, right_window_size=9), atol=5e-6, rtol=5e-6)


def test_keys_outside_do_not_matter(device: str) -> None:
    inputs = make_inputs(Case(dtype=torch.float16, q_len=1, kv_len=300, head_size=64, past=0), device)
    arguments = {"nonpad_kv_seqlen": torch.tensor([300, 260], device=device), "left_window_size": 20, "right_window_size": 0}
    tensors = {name: inputs[name] for name in ("Q", "K", "V")}
    before = attention(**tensors, **arguments)
    tensors["K"][:, :, :230], tensors["V"][:, :, :230] = 9.0, -4.0
    assert torch.equal(attention(**tensors, **arguments), before)
