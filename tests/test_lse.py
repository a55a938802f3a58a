"""attention.lse: the natural log-sum-exp of each row in float32, -inf for a row without keys."""

from __future__ import annotations

import pytest
import torch
from cases import FLOAT_DTYPES, INF, Case, check_attention, make_inputs

attention = torch.ops.onnx_attn.attention


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize(
    "features",
    [
        {},
        {"is_causal": True},
        {"mask": "bool"},
        {"mask": "same", "mask_axes": "b11k"},
        {"lengths": "ragged", "batch": 5, "is_causal": True},
        {"lengths": "ragged", "batch": 5, "q_len": 1, "kv_len": 600},
        {"softcap": 2.0, "left_window_size": 10},
        {"layout": "3d"},
        {"head_size": 300, "q_len": 3},
        {"scale": 0.0},
        {"kv_len": 0},
        {"q_len": 0},
        {"q_heads": 8, "kv_heads": 1, "q_len": 130, "kv_len": 300},
    ],
    ids=str,
)
def test_values(dtype: torch.dtype, features: dict[str, object], device: str) -> None:
    actual = check_attention(Case(**{"dtype": dtype, "q_len": 20, "kv_len": 70, "lse": True} | features), device)
    assert actual["lse"].is_contiguous()


def test_is_natural_and_minus_infinity_for_empty_rows(device: str) -> None:
    Q, K, V = (torch.zeros(1, 1, rows, 4, device=device) for rows in (2, 5, 5))
    mask = torch.tensor([[True] * 5, [False] * 5], device=device)
    _, lse = attention.lse(Q, K, V, mask, return_lse=True)
    torch.testing.assert_close(lse.flatten(), torch.tensor([torch.log(torch.tensor(5.0)), -INF], device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_parts_merge_into_the_whole(dtype: torch.dtype, device: str) -> None:
    """What it is for: attention over two parts of the keys, weighed by their log-sum-exp, is attention over all."""
    inputs = make_inputs(Case(dtype=dtype, q_len=9, kv_len=100, head_size=32), device)
    parts = []
    for rows in (slice(0, 37), slice(37, 100)):
        part = inputs | {name: inputs[name][:, :, rows] for name in ("K", "V")}
        parts.append(attention.lse(**part, return_lse=True))
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(Y.float() * torch.exp(part - lse)[..., None] for Y, part in parts)
    torch.testing.assert_close(merged.to(dtype), attention(**inputs), atol=2e-6 if dtype == torch.float32 else 3e-3, rtol=0)
    torch.testing.assert_close(lse, attention.lse(**inputs, return_lse=True)[1], atol=2e-5, rtol=0)
