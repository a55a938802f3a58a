"""Scores so far from 0 that the rounding of one is worth many binary orders. They are exact here, so the softmax is known."""

from __future__ import annotations

import pytest
import torch
from cases import HALF_DTYPES, assert_close, call_attention
from torch import Tensor

from torch_onnx_attn import reference

DTYPES = (*HALF_DTYPES, torch.float32)


def compare(inputs: dict[str, Tensor], absolute: float, **attributes: object) -> None:
    expected = reference.attention(**inputs, **attributes, return_lse=True)  # type: ignore[arg-type]
    actual = call_attention(inputs, None, True, **attributes)
    assert_close("Y", actual["Y"], expected.Y, absolute)
    assert expected.lse is not None
    assert_close("lse", actual["lse"], expected.lse, 1e-3, 2**-22)


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
