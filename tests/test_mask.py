"""attn_mask: bool keeps, numbers are added, any right-aligned broadcast, a short last axis excludes the rest."""

from __future__ import annotations

import math

import pytest
import torch
from cases import FLOAT_DTYPES, HALF_DTYPES, INF, NAN, Case, check_attention, compare_attention, make_inputs
from visibility import probe, seen

attention = torch.ops.onnx_attn.attention

AXES = ["bhqk", "b1qk", "1hqk", "11qk", "bh1k", "b11k", "1h1k", "111k", "bhq1", "hqk", "1qk", "h1k", "11k", "qk", "1k", "q1", "k", "1"]


@pytest.mark.parametrize("mask", ["bool", "float32"])
@pytest.mark.parametrize("axes", AXES)
def test_broadcasts(mask: str, axes: str, device: str) -> None:
    """A last axis of size 1 is a mask that speaks of one key only."""
    check_attention(Case(batch=3, q_len=5, kv_len=70, mask=mask, mask_axes=axes), device)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("mask", ["bool", "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"])
def test_types(dtype: torch.dtype, mask: str, device: str) -> None:
    """The mask's type is free; numbers of any type are added, 0 and 1 too."""
    check_attention(Case(dtype=dtype, q_len=17, kv_len=66, mask=mask), device)


@pytest.mark.parametrize("columns", [0, 1, 30, 63, 64, 65])
@pytest.mark.parametrize("mask", ["bool", "same"])
def test_shorter_than_the_keys(mask: str, columns: int, device: str) -> None:
    check_attention(Case(dtype=torch.float16, q_len=9, kv_len=66, mask=mask, mask_columns=columns), device)
    check_attention(Case(q_len=9, kv_len=36, past=30, mask=mask, mask_columns=columns), device)
    check_attention(Case(q_len=9, kv_len=66, lengths="ragged", batch=5, mask=mask, mask_axes="b11k", mask_columns=columns), device)


@pytest.mark.parametrize("q_len", [1, 64, 129])
@pytest.mark.parametrize("kv_len", [63, 77, 130])
@pytest.mark.parametrize("mask", ["bool", "same"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lengths_around_tiles(dtype: torch.dtype, mask: str, kv_len: int, q_len: int, device: str) -> None:
    check_attention(Case(dtype=dtype, q_len=q_len, kv_len=kv_len, head_size=32, mask=mask), device)


def test_rank_3_means_heads(device: str) -> None:
    """Batch and heads are both 2: the leading axis of a rank-3 mask is the heads' all the same."""
    inputs = make_inputs(Case(batch=2, q_heads=2, kv_heads=2, q_len=3, kv_len=4), device)
    mask = torch.zeros(2, 3, 4, device=device)
    mask[1] = -INF
    Y = attention(**inputs, attn_mask=mask)
    assert bool((Y[:, 1] == 0).all()) and bool((Y[:, 0] != 0).all())


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float16], ids=str)
def test_strides(dtype: torch.dtype, device: str) -> None:
    """Expanded, transposed, sliced from odd offsets: the mask is read where it lies."""
    inputs = make_inputs(Case(batch=2, q_heads=4, kv_heads=2, q_len=6, kv_len=10), device)
    base = torch.randn(2, 4, 13, 23)
    storage = (base > -0.5 if dtype == torch.bool else base.to(dtype)).to(device)
    masks = [
        storage[:, :, :6, 1:11],
        storage[:1, :1, :6, :10].expand(2, 4, 6, 10),
        storage[:, :, :10, :6].transpose(2, 3),
        storage[:, :, ::2, ::2][:, :, :6, :10],
        storage[0, 0, 0, :10].expand(6, 10),
        storage[:, :, :6, :1].expand(2, 4, 6, 10),
        storage.transpose(0, 1)[:2, :1, 3:9, 5:15],
    ]
    for mask in masks:
        compare_attention(inputs | {"attn_mask": mask}, {"Y": attention(**inputs, attn_mask=mask)})


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8], ids=str)
def test_integer_strides(dtype: torch.dtype, device: str) -> None:
    inputs = make_inputs(Case(batch=2, q_heads=4, kv_heads=2, q_len=6, kv_len=10), device)
    storage = torch.randint(-3, 4, (2, 4, 13, 23), dtype=dtype, device=device)
    for mask in (
        storage[:, :, :10, :6].transpose(2, 3),
        storage[:1, :1, :6, :10].expand(2, 4, 6, 10),
        storage[0, 0, 0, 3:13].expand(6, 10),
    ):
        compare_attention(inputs | {"attn_mask": mask}, {"Y": attention(**inputs, attn_mask=mask)})


# ---------------------------------------------------------------------------------------------------------------------
# Rows without keys, and rows that only look like it


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("kv_len", [3, 130])
def test_dead_row_is_zero(dtype: torch.dtype, kind: str, kv_len: int, device: str) -> None:
    """Also when what it does not see is NaN."""
    inputs = make_inputs(Case(dtype=dtype, q_len=3, kv_len=kv_len), device)
    inputs["V"][0, 0, kv_len - 1] = NAN
    keep = torch.ones(3, kv_len, dtype=torch.bool, device=device)
    keep[1] = False
    mask = keep if kind == "bool" else torch.zeros(3, kv_len, dtype=dtype, device=device).masked_fill(~keep, -INF)
    Y, weights = attention.qk(**inputs, attn_mask=mask, qk_matmul_output_mode=3)
    assert bool((Y[:, :, 1] == 0).all()) and bool((weights[:, :, 1] == 0).all())
    assert bool(Y[1, :, 0].isfinite().all()) and bool((Y[1, :, 0] != 0).any())
    assert bool((attention(**inputs, attn_mask=mask)[:, :, 1] == 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_DTYPES], ids=str)
@pytest.mark.parametrize("bias", ["lowest", -1e9, -1e30])
@pytest.mark.parametrize("kv_len", [4, 130])
def test_finite_minimum_is_not_dead(dtype: torch.dtype, bias: str | float, kv_len: int, device: str) -> None:
    """A finite bias leaves a softmax, however low: float32 scores drown in it and the row is the mean of V."""
    inputs = make_inputs(Case(dtype=dtype, q_len=3, kv_len=kv_len), device)
    number = torch.finfo(torch.float32).min if bias == "lowest" else bias
    mask = torch.zeros(3, kv_len, device=device)
    mask[1] = number
    mask[2, 1:] = number
    actual = {"Y": attention(**inputs, attn_mask=mask)}
    compare_attention(inputs | {"attn_mask": mask}, actual)
    mean = inputs["V"].double().mean(2).repeat_interleave(2, 1)
    torch.testing.assert_close(actual["Y"][:, :, 1].double(), mean, atol=1e-2 if dtype in HALF_DTYPES else 1e-5, rtol=0)
    last_bit = 2**-23 if inputs["V"].is_cuda and dtype == torch.float32 else 0  # tensor cores get float32 as pairs of 16-bit numbers
    torch.testing.assert_close(actual["Y"][:, :, 2], inputs["V"][:, :, 0].repeat_interleave(2, 1), rtol=last_bit, atol=0)


def test_float64_scores_do_not_drown(device: str) -> None:
    inputs = make_inputs(Case(dtype=torch.float64, q_len=3, kv_len=4), device)
    mask = torch.full((3, 4), -1e9, dtype=torch.float64, device=device)
    Y = attention(**inputs, attn_mask=mask)
    torch.testing.assert_close(Y, attention(**inputs), atol=1e-6, rtol=0)


def test_double_softmax_precision_keeps_them_apart_too(device: str) -> None:
    inputs = make_inputs(Case(q_len=3, kv_len=4), device)
    mask = torch.full((3, 4), -1e9, device=device)
    Y = attention(**inputs, attn_mask=mask, softmax_precision=11)
    torch.testing.assert_close(Y, attention(**inputs), atol=1e-5, rtol=0)


def test_float16_minimum_plus_a_negative_score(device: str) -> None:
    """-65504 - 20 is beyond float16, not beyond a score: the row is a softmax, not NaN."""
    Q, K = (torch.full((1, 1, rows, 4), value, dtype=torch.float16, device=device) for rows, value in ((1, 5.0), (3, -2.0)))
    V = torch.randn(1, 1, 3, 4).to(device, torch.float16)
    mask = torch.full((1, 3), -65504.0, dtype=torch.float16, device=device)
    compare_attention({"Q": Q, "K": K, "V": V, "attn_mask": mask}, {"Y": attention(Q, K, V, mask)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_bool_mask_beats_any_score(dtype: torch.dtype, device: str) -> None:
    """A finite stand-in for -inf such as -10000 loses against a score of 20000."""
    Q = torch.full((1, 1, 1, 16), 50.0, dtype=dtype, device=device)
    K = torch.zeros(1, 1, 2, 16, dtype=dtype, device=device)
    K[:, :, 1] = 25.0
    V = torch.tensor([1.0, 1000.0], dtype=dtype, device=device).view(1, 1, 2, 1).expand(1, 1, 2, 16)
    mask = torch.tensor([[True, False]], device=device)
    assert bool((attention(Q, K, V, mask, scale=1.0) == 1).all())
    assert bool((attention(Q, K, V, torch.tensor([[0.0, -INF]], device=device), scale=1.0) == 1).all())


def test_zero_one_integers_mask_nothing(device: str) -> None:
    """A tokenizer's int64 mask is a bias of 0 and 1. Only bool switches keys off."""
    inputs = probe(1, 4, device=device)
    Y = attention(**inputs, attn_mask=torch.tensor([[1, 1, 0, 0]], device=device))
    weights = torch.tensor([math.e, math.e, 1.0, 1.0], device=device)
    torch.testing.assert_close(Y[0, 0, 0], weights / weights.sum())


def test_visibility(device: str) -> None:
    mask = torch.tensor([[True, False, True], [False, False, False]], device=device)
    assert seen(attention(**probe(2, 5, device=device), attn_mask=mask)) == [["#.#..", "....."]]


def test_mask_is_added_after_softcap(device: str) -> None:
    """The capped score of a masked key must not come back: V[1] = 1000 would show."""
    Q = torch.ones(1, 1, 1, 4, device=device)
    K = torch.tensor([1.0, 50.0], device=device).view(1, 1, 2, 1).expand(1, 1, 2, 4)
    V = torch.tensor([1.0, 1000.0], device=device).view(1, 1, 2, 1).expand(1, 1, 2, 4)
    for mask in (torch.tensor([[True, False]], device=device), torch.tensor([[0.0, -INF]], device=device)):
        assert bool((attention(Q, K, V, mask, softcap=1.0) == 1).all())
