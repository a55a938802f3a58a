"""Grouped heads: query head h reads key head h // (q_heads / kv_heads)."""

from __future__ import annotations

import pytest
import torch
from cases import FLOAT_DTYPES, Case, check_attention, compare_attention, make_inputs

attention = torch.ops.onnx_attn.attention


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(1, 1), (3, 3), (9, 3), (8, 1), (6, 2), (5, 1), (16, 2)])
@pytest.mark.parametrize("layout", ["bhsd", "3d"])
def test_head_counts(dtype: torch.dtype, q_heads: int, kv_heads: int, layout: str, device: str) -> None:
    check_attention(Case(dtype=dtype, q_heads=q_heads, kv_heads=kv_heads, layout=layout, q_len=7, kv_len=33, head_size=24), device)


@pytest.mark.parametrize("q_len", [1, 2, 5, 64])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(8, 1), (12, 4), (7, 1), (64, 2)])
def test_decode(q_heads: int, kv_heads: int, q_len: int, device: str) -> None:
    case = Case(dtype=torch.bfloat16, batch=5, q_heads=q_heads, kv_heads=kv_heads, q_len=q_len, kv_len=200, head_size=32, lengths="ragged")
    check_attention(case, device)
    check_attention(Case(**vars(case) | {"is_causal": True, "mask": "bool", "mask_axes": "bhqk"}), device)


def test_heads_are_neighbours_not_tiles(device: str) -> None:
    """4 query heads on 2 key heads: 0 0 1 1, not 0 1 0 1."""
    Q, K = torch.zeros(1, 4, 1, 4, device=device), torch.zeros(1, 2, 3, 4, device=device)
    V = torch.tensor([1.0, 2.0], device=device).view(1, 2, 1, 1).expand(1, 2, 3, 4)
    assert attention(Q, K, V)[0, :, 0, 0].tolist() == [1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("kv_len", [33, 64, 129])
def test_keys_expanded_over_heads(kv_len: int, device: str) -> None:
    """A stride of 0 on the head axis is as good as grouping."""
    inputs = make_inputs(Case(q_heads=4, kv_heads=1, q_len=5, kv_len=kv_len, mask="bool"), device)
    expanded = inputs | {name: inputs[name].expand(2, 4, kv_len, 16) for name in ("K", "V")}
    compare_attention(expanded, {"Y": attention(**expanded)})
    torch.testing.assert_close(attention(**expanded), attention(**inputs), atol=5e-6, rtol=5e-6)


def test_mask_has_query_heads(device: str) -> None:
    """The mask's head axis counts query heads, also where several of them share a key head."""
    for dtype in (torch.float32, torch.float16):
        check_attention(Case(dtype=dtype, q_heads=6, kv_heads=2, q_len=3, kv_len=70, mask="same", mask_axes="1h1k"), device)
        check_attention(Case(dtype=dtype, q_heads=6, kv_heads=2, q_len=1, kv_len=70, mask="bool", mask_axes="hqk"), device)


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_score_outputs_have_query_heads(mode: int, device: str) -> None:
    check_attention(Case(q_heads=6, kv_heads=2, q_len=3, kv_len=70, mask="same", qk_matmul_output_mode=mode, softcap=3.0), device)


def test_wide_values_with_past(device: str) -> None:
    """head_size != v_head_size with one key head and a cache."""
    for q_len in (1, 4):
        case = Case(
            dtype=torch.float16, q_heads=8, kv_heads=1, q_len=q_len, kv_len=q_len, past=33, head_size=256, v_head_size=512, is_causal=True
        )
        check_attention(case, device)
