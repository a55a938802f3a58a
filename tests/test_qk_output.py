"""qk_matmul_output: 0 the scaled product, 1 after softcap, 2 after mask and bias, 3 after softmax."""

from __future__ import annotations

import pytest
import torch
from cases import FLOAT_DTYPES, INF, Case, assert_close, check_attention, make_inputs

from torch_onnx_attn import reference

attention = torch.ops.onnx_attn.attention
MODES = (0, 1, 2, 3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("mask", [None, "bool", "float32"])
def test_values(mode: int, dtype: torch.dtype, softcap: float, mask: str | None, device: str) -> None:
    check_attention(Case(dtype=dtype, q_len=9, kv_len=33, softcap=softcap, mask=mask, qk_matmul_output_mode=mode), device)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "features",
    [
        {"is_causal": True},
        {"left_window_size": 20, "right_window_size": 3},
        {"past": 40, "is_causal": True},
        {"past": 0},
        {"lengths": "ragged", "batch": 5, "is_causal": True},
        {"mask": "bool", "mask_columns": 30},
        {"mask": "same", "mask_axes": "h1k", "is_causal": True, "past": 5},
        {"layout": "3d", "q_heads": 6, "kv_heads": 2},
        {"layout": "bshd", "head_size": 300},
        {"q_len": 130, "kv_len": 130, "is_causal": True},
        {"q_len": 1, "kv_len": 600, "lengths": "ragged", "batch": 5},
        {"softmax_precision": 11},
        {"q_len": 150, "kv_len": 1300, "is_causal": True, "past": 11, "head_size": 72},
        {"q_len": 70, "kv_len": 1043, "mask": "same", "lengths": "ragged", "batch": 5, "left_window_size": 300},
        {"q_len": 70, "kv_len": 131, "mask": "float64", "mask_axes": "b1qk", "layout": "loose"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_composes(mode: int, features: dict[str, object], dtype: torch.dtype, device: str) -> None:
    check_attention(Case(**{"dtype": dtype, "q_len": 17, "kv_len": 70, "qk_matmul_output_mode": mode} | features), device)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "features",
    [
        {},
        {"is_causal": True},
        {"softcap": 2.0},
        {"softcap": 2.0, "is_causal": True, "head_size": 128},
        {"head_size": 128, "is_causal": True, "past": 56},
        {"head_size": 72, "kv_len": 8, "q_len": 321},
        {"head_size": 128, "kv_len": 1304, "q_len": 330, "left_window_size": 150, "right_window_size": 20},
        {"q_len": 129, "lengths": "ragged", "batch": 5},
        {"q_len": 385, "kv_len": 392, "lengths": "ragged", "batch": 5, "is_causal": True, "head_size": 128},
        {"head_size": 128, "v_head_size": 64, "layout": "bshd"},
        {"head_size": 256, "is_causal": True},
        {"scale": 1.0, "head_size": 128},
        {"scale": 0.0},
        {"kv_len": 299, "is_causal": True},  # rows that are not aligned
        {"batch": 3, "q_heads": 24, "kv_heads": 6, "q_len": 300, "kv_len": 512, "is_causal": True},  # more blocks than multiprocessors
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_many_rows(mode: int, features: dict[str, object], dtype: torch.dtype, device: str) -> None:
    check_attention(
        Case(**{"dtype": dtype, "q_len": 200, "kv_len": 264, "head_size": 64, "qk_matmul_output_mode": mode} | features), device
    )


@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_weights_of_large_scores(head_size: int, dtype: torch.dtype, device: str) -> None:
    """Beyond 64 the rounding of a log-sum-exp would show in weights made from it."""
    inputs = make_inputs(Case(dtype=dtype, q_len=200, kv_len=264, head_size=head_size), device)
    inputs["Q"] *= 40
    weights = attention.qk(**inputs, is_causal=True, qk_matmul_output_mode=3)[1]
    expected = reference.attention(**inputs, is_causal=True, qk_matmul_output_mode=3, return_lse=True)
    assert expected.lse is not None and float(expected.lse.abs().max()) > 100
    torch.testing.assert_close(weights.double(), expected.qk_matmul_output, atol=1e-6, rtol=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("q_len", [1, 3, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_subnormal_weights(dtype: torch.dtype, q_len: int, device: str) -> None:
    """Weights below the smallest normal float32 are weights: they are an output here, not only a term of a sum."""
    keys = torch.zeros(1, 1, 64, 64, dtype=dtype, device=device)
    keys[..., 0] = -torch.arange(64, device=device)
    inputs = {"Q": torch.full((1, 1, q_len, 64), 1.5, dtype=dtype, device=device), "K": keys, "V": torch.ones_like(keys)}
    weights = attention.qk(**inputs, scale=1.0, qk_matmul_output_mode=3)[1]
    expected = reference.attention(**inputs, scale=1.0, qk_matmul_output_mode=3).qk_matmul_output
    assert 0 < float(expected[..., 60].max()) < torch.finfo(torch.float32).smallest_normal
    assert_close("qk_matmul_output", weights, expected, 0.0, relative=1e-4 if dtype == torch.float32 else 2**-8)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_modes_differ_where_they_should(dtype: torch.dtype, device: str) -> None:
    inputs = make_inputs(Case(dtype=dtype, q_len=6, kv_len=6, mask="bool"), device)
    raw, capped, masked, weights = (attention.qk(**inputs, softcap=0.5, is_causal=True, qk_matmul_output_mode=mode)[1] for mode in MODES)
    assert bool(raw.isfinite().all()) and bool(capped.isfinite().all())  # defined at masked cells too
    assert float(raw.abs().max()) > 0.5 >= float(capped.abs().max())
    hidden = masked == -INF
    causal = torch.ones(6, 6, dtype=torch.bool, device=device).tril()
    assert torch.equal(hidden, ~(inputs["attn_mask"] & causal))
    torch.testing.assert_close(masked[~hidden], capped[~hidden])
    assert torch.equal(weights == 0, hidden)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("bias", [-1e9, -60000.0, "lowest"])
def test_weights_of_rows_that_a_bias_lowers(dtype: torch.dtype, bias: float | str, device: str) -> None:
    """The maximum of such a row takes the sum of its exponentials out of a rounded log-sum-exp."""
    inputs = make_inputs(Case(dtype=dtype, q_len=40, kv_len=50), device)
    mask = torch.zeros(40, 50, device=device)
    mask[3:20] = torch.finfo(torch.float32).min if bias == "lowest" else bias
    weights = attention.qk(**inputs, attn_mask=mask, qk_matmul_output_mode=3)[1].double()
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]), atol=50 * torch.finfo(dtype).eps, rtol=0)
    if bias != -60000.0 and dtype != torch.float64:  # float32 scores that the bias has swallowed
        torch.testing.assert_close(weights[:, :, 3:20], torch.full_like(weights[:, :, 3:20], 1 / 50), atol=0, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_weights_sum_to_one_or_nothing(dtype: torch.dtype, device: str) -> None:
    inputs = make_inputs(Case(dtype=dtype, q_len=5, kv_len=100, mask="bool"), device)
    sums = attention.qk(**inputs, qk_matmul_output_mode=3)[1].double().sum(-1)
    dead = ~inputs["attn_mask"].any(-1)
    assert bool(dead.any()) and bool((sums[dead] == 0).all())
    torch.testing.assert_close(sums[~dead], torch.ones_like(sums[~dead]), atol=100 * torch.finfo(dtype).eps, rtol=0)


@pytest.mark.parametrize("precision", [1, 10, 11, 16])
def test_weights_keep_the_type_of_Q(precision: int, device: str) -> None:
    inputs = make_inputs(Case(dtype=torch.float16), device)
    assert attention.qk(**inputs, softmax_precision=precision, qk_matmul_output_mode=3)[1].dtype == torch.float16


def test_bias_beyond_the_type(device: str) -> None:
    """A float32 bias of -1e9 or the float16 score of 80000 become infinite in float16 output, as any rounding does."""
    inputs = {name: torch.full((1, 1, rows, 8), 100.0, dtype=torch.float16, device=device) for name, rows in (("Q", 1), ("K", 2), ("V", 2))}
    mask = torch.tensor([[-1e9, 0.0]], device=device)
    Y, scores = attention.qk(**inputs, attn_mask=mask, scale=1.0, qk_matmul_output_mode=2)
    assert scores.flatten().tolist() == [-INF, INF]
    assert bool((Y == 100).all())
