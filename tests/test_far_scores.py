"""Scores so far from 0 that the rounding of one is worth many binary orders. They are exact here, so the softmax is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import HALF_DTYPES, assert_close, call_attention, unit_roundoff
from torch import Tensor

from torch_onnx_attn import reference

DTYPES = (*HALF_DTYPES, torch.float32)
COLUMNS = 16  # of Q and K that are not 0


def compare(inputs: dict[str, Tensor], absolute: float, **attributes: Any) -> None:
    expected = reference.attention(**inputs, **attributes, return_lse=True)
    actual = call_attention(inputs, None, True, **attributes)
    assert_close("Y", actual["Y"], expected.Y, absolute)
    assert expected.lse is not None
    assert_close("lse", actual["lse"], expected.lse, 1e-3, 2**-22)


def one_hot_inputs(dtype: torch.dtype, q_len: int, kv_len: int, exponent: int, sign: int, head_size: int, device: str) -> dict[str, Tensor]:
    """Scores of a row are 2^exponent times one of eight numbers from 1 to 15 / 8 times one of three from 1 to 10 / 8: the largest win,
    and share."""
    generator = torch.Generator().manual_seed(exponent)
    power = (exponent - 4) // 2
    row = torch.randint(8, 16, (2, 4, q_len, 1), generator=generator) / 8 * sign * 2.0**power
    key = torch.randint(8, 11, (2, 2, kv_len, 1), generator=generator) / 8 * 2.0 ** (exponent - 4 - power)
    Q, K = torch.zeros(2, 4, q_len, head_size), torch.zeros(2, 2, kv_len, head_size)
    Q[..., :COLUMNS], K[..., :COLUMNS] = row, key
    V = torch.randn(2, 2, kv_len, head_size, generator=generator)
    return {"Q": Q.to(device, dtype), "K": K.to(device, dtype), "V": V.to(device, dtype)}


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("exponent", [12, 17, 22, 26, 27, 28, 29, 30, 32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("q_len", "head_size"), [(1, 64), (5, 128), (65, 64), (200, 64), (130, 128), (70, 256)])
def test_scores(q_len: int, head_size: int, dtype: torch.dtype, exponent: int, sign: int, device: str) -> None:
    """A row's weights share the rounding error of its largest score; from 2^27 on that alone is more than a float16 holds."""
    compare(one_hot_inputs(dtype, q_len, 300, exponent, sign, head_size, device), 8 * unit_roundoff(dtype), scale=0.5)


@pytest.mark.parametrize("features", [{"is_causal": True}, {"left_window_size": 40, "right_window_size": 3}, {"scale": 0.3}], ids=str)
@pytest.mark.parametrize("exponent", [22, 28, 32])
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_scores_with_limits(dtype: torch.dtype, exponent: int, features: dict[str, Any], device: str) -> None:
    compare(one_hot_inputs(dtype, 200, 300, exponent, -1, 64, device), 8 * unit_roundoff(dtype), **({"scale": 0.5} | features))


@pytest.mark.parametrize("first_is_largest", [True, False])
@pytest.mark.parametrize("exponent", [16, 22, 28])
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_scores_that_grow(dtype: torch.dtype, head_size: int, exponent: int, first_is_largest: bool, device: str) -> None:
    """A row comes far from 0 in the middle of its keys, beside rows that do so elsewhere, or never."""
    kv_len = 1000
    inputs = one_hot_inputs(dtype, 200, kv_len, exponent, 1, head_size, device)
    eighth = torch.arange(kv_len, device=device) * 8 // kv_len
    inputs["K"] *= 2.0 ** (-2 * (eighth if first_is_largest else 7 - eighth)).to(dtype)[:, None]
    inputs["Q"] *= 2.0 ** -(torch.arange(200, device=device) % 5 * 2).to(dtype)[:, None]
    compare(inputs, 8 * unit_roundoff(dtype), scale=0.5)


@pytest.mark.parametrize("exponent", [22, 28, 32])
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_scores_kept(dtype: torch.dtype, exponent: int, device: str) -> None:
    inputs = one_hot_inputs(dtype, 200, 304, exponent, 1, 64, device)
    keep = torch.rand(2, 1, 200, 304, generator=torch.Generator().manual_seed(1)) < 0.5
    compare(inputs | {"attn_mask": keep.to(device)}, 8 * unit_roundoff(dtype), scale=0.5)


@pytest.mark.parametrize("q_len", [1, 12, 65])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_biases_where_floats_are_far_apart(dtype: torch.dtype, q_len: int, device: str) -> None:
    """In base 2 these scores are multiples of 16, and 2^16 is no float16. Every weight but the largest is e^-16: 2^-16 after rounding."""
    heads, kv_len, head_size = 16, 600, 64
    generator = torch.Generator().manual_seed(q_len)
    Q, K = torch.zeros(1, heads, q_len, head_size), torch.zeros(1, heads, kv_len, head_size)
    Q[..., 0] = 16
    largest = torch.randint(0, kv_len, (heads,), generator=generator)
    K[0, torch.arange(heads), largest, 0] = 8
    V = torch.randn(1, heads, kv_len, head_size, generator=generator)
    bias = -8.0 * torch.randint(12_000_000, 22_000_000, (1, heads, 1, 1), generator=generator)
    inputs = {"Q": Q.to(device, dtype), "K": K.to(device, dtype), "V": V.to(device, dtype)}
    inputs["attn_mask"] = bias.expand(1, heads, q_len, kv_len).contiguous().to(device)
    compare(inputs, kv_len * 2**-16 * 5, scale=0.125)
