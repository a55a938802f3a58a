"""softcap: cap * tanh(score / cap), after the scale and before any bias."""

from __future__ import annotations

import pytest
import torch
from cases import FLOAT_DTYPES, Case, check_attention, make_inputs

attention = torch.ops.onnx_attn.attention


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [0.5, 2.0, 30.0, 50.0])
@pytest.mark.parametrize("scale", [None, 1.0])
def test_values(dtype: torch.dtype, softcap: float, scale: float | None, device: str) -> None:
    check_attention(Case(dtype=dtype, q_len=33, kv_len=70, head_size=32, softcap=softcap, scale=scale), device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "features",
    [
        {"mask": "bool"},
        {"mask": "same"},
        {"is_causal": True},
        {"lengths": "ragged", "batch": 5},
        {"lengths": "ragged", "batch": 5, "is_causal": True, "mask": "bool"},
        {"past": 40, "is_causal": True},
        {"left_window_size": 10, "right_window_size": 5},
        {"lse": True},
        {"q_len": 1, "lengths": "ragged", "batch": 5},
    ],
    ids=str,
)
def test_composes(dtype: torch.dtype, features: dict[str, object], device: str) -> None:
    check_attention(Case(**{"dtype": dtype, "q_len": 20, "kv_len": 70, "softcap": 1.5} | features), device)


def test_padding_does_not_leak(device: str) -> None:
    """A length mask applied before the cap would leave its keys at -cap, with about a quarter of the weight here."""
    Q, K = torch.zeros(1, 1, 1, 4, device=device), torch.zeros(1, 1, 4, 4, device=device)
    V = torch.tensor([1.0, 1.0, 1000.0, 1000.0], device=device).view(1, 1, 4, 1).expand(1, 1, 4, 4)
    assert bool((attention(Q, K, V, nonpad_kv_seqlen=torch.tensor([2], device=device), softcap=1.0) == 1).all())
    assert bool((attention(Q, K, V, is_causal=True, softcap=1.0) == 1).all())


def test_no_cap_is_the_limit_of_a_large_one(device: str) -> None:
    inputs = make_inputs(Case(q_len=9, kv_len=33), device)
    torch.testing.assert_close(attention(**inputs, softcap=1e4), attention(**inputs, softcap=0.0), atol=1e-4, rtol=1e-4)


def test_scores_beyond_exp_stay_finite(device: str) -> None:
    """Raw scores of +-80000 end at +-cap."""
    Q = torch.full((1, 1, 1, 8), 100.0, dtype=torch.float16, device=device)
    K = torch.tensor([1.0, -1.0], device=device).view(1, 1, 2, 1).expand(1, 1, 2, 8).half() * 100
    V = torch.tensor([1.0, 0.0], device=device).view(1, 1, 2, 1).expand(1, 1, 2, 8).half()
    Y = attention(Q, K, V, scale=1.0, softcap=1.0)
    torch.testing.assert_close(Y.float(), torch.full_like(Y, 0.8808).float(), atol=1e-3, rtol=0)
