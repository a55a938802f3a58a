"""Plain attention: every type, layout, head size and length, and the sizes at which loops begin and end."""

from __future__ import annotations

import pytest
import torch
from cases import FLOAT_DTYPES, HALF_DTYPES, Case, Source, check_attention, make_inputs

EDGES = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "3d", "loose"])
def test_types_and_layouts(dtype: torch.dtype, layout: str, device: str) -> None:
    check_attention(Case(dtype=dtype, layout=layout, batch=3, q_len=33, kv_len=70, head_size=40), device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("q_len", EDGES)
def test_query_lengths(dtype: torch.dtype, q_len: int, device: str) -> None:
    check_attention(Case(dtype=dtype, q_len=q_len, kv_len=70, head_size=32), device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kv_len", [*EDGES, 255, 256, 257, 511, 513])
def test_key_lengths(dtype: torch.dtype, kv_len: int, device: str) -> None:
    check_attention(Case(dtype=dtype, q_len=5, kv_len=kv_len, head_size=32), device)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_DTYPES], ids=str)
@pytest.mark.parametrize("head_size", [1, 2, 8, 37, 64, 80, 96, 127, 128, 192, 256, 257, 300, 512, 513])
def test_head_sizes(dtype: torch.dtype, head_size: int, device: str) -> None:
    check_attention(Case(dtype=dtype, q_len=17, kv_len=66, head_size=head_size), device)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("head_size", "v_head_size"), [(1, 64), (64, 1), (72, 96), (96, 72), (192, 128), (128, 192), (64, 512), (576, 512), (40, 300)]
)
def test_value_head_size_differs(dtype: torch.dtype, head_size: int, v_head_size: int, device: str) -> None:
    check_attention(Case(dtype=dtype, q_len=4, kv_len=66, head_size=head_size, v_head_size=v_head_size), device)


@pytest.mark.parametrize("scale", [None, 0.0, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_scale(dtype: torch.dtype, scale: float | None, device: str) -> None:
    check_attention(Case(dtype=dtype, scale=scale, q_len=9, kv_len=33, head_size=24), device)


def test_scale_zero_is_the_mean(device: str) -> None:
    """0 is a real scale, not "unset": all weights are equal."""
    inputs = make_inputs(Case(q_heads=2, kv_heads=2, kv_len=8), device)
    Y = torch.ops.onnx_attn.attention(**inputs, scale=0.0)
    torch.testing.assert_close(Y, inputs["V"].mean(2, keepdim=True).expand_as(Y))


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "3d"])
@pytest.mark.parametrize(("batch", "q_len", "kv_len"), [(0, 5, 9), (2, 0, 9), (2, 5, 0), (0, 0, 0), (1, 0, 0)], ids=lambda size: str(size))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_empty(dtype: torch.dtype, batch: int, q_len: int, kv_len: int, layout: str, device: str) -> None:
    """No batch or no queries: an empty result. No keys: zeros."""
    actual = check_attention(Case(dtype=dtype, batch=batch, q_len=q_len, kv_len=kv_len, layout=layout), device)
    assert not bool(actual["Y"].any()) or kv_len > 0


@pytest.mark.parametrize(
    "features", [{"past": 0}, {"qk_matmul_output_mode": 3}, {"lse": True}, {"mask": "bool"}, {"lengths": "full"}], ids=str
)
def test_no_keys_with_other_outputs(features: dict[str, object], device: str) -> None:
    check_attention(Case(kv_len=0, **features), device)


def test_all_scores_far_below_zero(device: str) -> None:
    """Scores near -120: a tile's tail of zeros instead of -inf would win the maximum and overflow the exponentials."""
    source = Source("far below zero", device)
    for kv_len in (64, 192, 200, 704):
        for dtype in HALF_DTYPES:
            V = source.normal(1, 2, kv_len, 64, dtype=dtype)
            ones = torch.ones(1, 2, kv_len, 64, dtype=dtype, device=device)
            Y = torch.ops.onnx_attn.attention(ones[:, :, :3], ones * -15, V)
            torch.testing.assert_close(Y.double(), V.double().mean(2, keepdim=True).expand(1, 2, 3, 64), atol=2e-2, rtol=0)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 5), (3, 5), (70, 200), (1, 3000)])
def test_nan_is_not_hidden(dtype: torch.dtype, q_len: int, kv_len: int, device: str) -> None:
    """A NaN shows in every row that sees it, as NaN and not as an empty row, and in no other head or entry."""
    inputs = make_inputs(Case(dtype=dtype, q_heads=2, kv_heads=2, q_len=q_len, kv_len=kv_len), device)
    for name in ("Q", "K", "V"):
        broken = {key: x.clone() for key, x in inputs.items()}
        broken[name][1, 0, 0, 0] = float("nan")
        for softcap in (0.0, 2.0):
            Y, lse = torch.ops.onnx_attn.attention.lse(**broken, softcap=softcap, return_lse=True)
            seen = Y[1, 0, :, 0] if name != "Q" else Y[1, 0, :1, 0]
            assert bool(seen.isnan().all())
            assert bool(lse[1, 0, 0].isnan()) == (name != "V")
            assert bool(Y[0].isfinite().all()) and bool(Y[1, 1].isfinite().all()) and bool(Y[1, 0, 1:].isfinite().all() or name != "Q")


def test_outputs_are_new_tensors(device: str) -> None:
    """Nothing that comes back shares memory with an input, also where a copy is all there is to do."""
    inputs = make_inputs(Case(past=0, q_heads=2, kv_heads=2, q_len=1, kv_len=1), device)
    for output in torch.ops.onnx_attn.attention.kv(**inputs):
        assert all(output.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() for x in inputs.values() if x.numel())


def test_every_output_combination_agrees(device: str) -> None:
    """Y does not depend, beyond rounding, on what else is asked for."""
    case = Case(dtype=torch.float32, q_len=20, kv_len=40, is_causal=True, mask="same")
    for features in ({}, {"past": 0}, {"past": 7}, {"qk_matmul_output_mode": 0}, {"qk_matmul_output_mode": 2, "past": 7}, {"lse": True}):
        check_attention(Case(**vars(case) | features), device)
