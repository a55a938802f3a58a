"""Types: V's own, softmax_precision, float16 overflow, and the accuracy each type is held to."""

from __future__ import annotations

import math

import pytest
import torch
from cases import FLOAT_DTYPES, HALF_DTYPES, Case, Source, check_attention, compare_attention, make_inputs, tolerance

from torch_onnx_attn import reference

attention = torch.ops.onnx_attn.attention


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("v_dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("features", [{}, {"past": 9, "is_causal": True}, {"lengths": "ragged", "batch": 5}, {"layout": "3d"}], ids=str)
def test_value_type_differs(dtype: torch.dtype, v_dtype: torch.dtype, features: dict[str, object], device: str) -> None:
    """Y has Q's type, present_value V's."""
    check_attention(Case(**{"dtype": dtype, "v_dtype": v_dtype, "q_len": 9, "kv_len": 70, "v_head_size": 24} | features), device)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("precision", [1, 10, 11, 16])
@pytest.mark.parametrize("mode", [None, 2, 3])
def test_softmax_precision(dtype: torch.dtype, precision: int, mode: int | None, device: str) -> None:
    """Never less than float32: 10 and 16 do not lower it; 11 is double."""
    check_attention(Case(dtype=dtype, softmax_precision=precision, q_len=9, kv_len=70, qk_matmul_output_mode=mode, mask="float32"), device)


def test_double_precision_of_float32_inputs(device: str) -> None:
    """softmax_precision 11 sums in float64, products included: the result is the float64 one but for its last rounding."""
    inputs = make_inputs(Case(q_len=9, kv_len=300, head_size=128), device)
    exact = reference.attention(**inputs, softmax_precision=11).Y
    error = (attention(**inputs, softmax_precision=11).double() - exact).abs()
    assert bool((error <= exact.abs() * 2**-24 + 1e-12).all())


@pytest.mark.parametrize("head_size", [40, 64, 100, 128, 200, 256])
@pytest.mark.parametrize("features", [{"is_causal": True}, {"mask": "float32"}, {"mask": "bool", "softcap": 20.0}, {"lse": True}], ids=str)
def test_float32_keeps_its_bits(head_size: int, features: dict[str, object], device: str) -> None:
    """Whatever hardware multiplies: no TF32."""
    check_attention(Case(**{"q_len": 150, "kv_len": 310, "head_size": head_size} | features), device)


@pytest.mark.parametrize("spread", [5.0, 20.0, 1e-20, 1e15])
def test_float32_of_any_magnitude(spread: float, device: str) -> None:
    """Rows may differ by many binary orders, and whole tensors lie far from 1."""
    source = Source(f"magnitudes {spread}", device)
    Q, K, V = (source.normal(2, 2, rows, 64) for rows in (70, 200, 200))
    factor = torch.exp2(source.normal(2, 2, 200, 1) * spread) if 1 < spread < 100 else spread
    inputs = {"Q": Q, "K": K, "V": V * factor}
    expected = reference.attention(**inputs)
    weights = reference.attention(**inputs, qk_matmul_output_mode=3).qk_matmul_output
    assert weights is not None
    terms = weights @ inputs["V"].double().abs()
    assert bool(((attention(**inputs).double() - expected.Y).abs() <= 4e-6 * terms).all())


def test_float32_sums_are_rounded_not_truncated(device: str) -> None:
    """Sums in a tensor core lose a little each time, always downwards: 4096 positive values would show it."""
    source = Source("positive values", device)
    inputs = {"Q": source.normal(1, 2, 64, 64), "K": source.normal(1, 2, 4096, 64), "V": source.normal(1, 2, 4096, 64).abs() + 1}
    expected = reference.attention(**inputs).Y
    assert float((attention(**inputs).double() / expected - 1).abs().max()) < 2e-6


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("kv_len", [130, 1000])
def test_large_scores(dtype: torch.dtype, kv_len: int, device: str) -> None:
    """Scores of several hundred: the softmax is a choice of one key."""
    check_attention(Case(dtype=dtype, q_len=9, kv_len=kv_len, head_size=64, scale=30.0), device)


def test_float16_scores_beyond_65504(device: str) -> None:
    Q = torch.full((1, 1, 1, 8), 100.0, dtype=torch.float16, device=device)
    K = torch.full((1, 1, 3, 8), 100.0, dtype=torch.float16, device=device)
    V = torch.tensor([1.0, 2.0, 6.0], device=device).half().view(1, 1, 3, 1).expand(1, 1, 3, 8)
    torch.testing.assert_close(attention(Q, K, V, scale=1.0), torch.full_like(Q, 3.0))
    Y, scores = attention.qk(Q, K, V, scale=1.0, qk_matmul_output_mode=0)  # the output itself does not fit
    assert bool(scores.isinf().all()) and bool((Y == 3).all())


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_sums_beyond_65504(dtype: torch.dtype, device: str) -> None:
    """70000 equal keys: a float16 running sum would overflow."""
    V = torch.cat([torch.ones(1, 1, 52500, 2), torch.zeros(1, 1, 17500, 2)], 2).to(device, dtype)
    Y = attention(torch.zeros(1, 1, 2, 8, dtype=dtype, device=device), torch.zeros(1, 1, 70000, 8, dtype=dtype, device=device), V)
    torch.testing.assert_close(Y, torch.full_like(Y, 0.75))


def test_average_of_the_largest_float16(device: str) -> None:
    """65504 averaged over 300 keys is 65504: sums are float32."""
    Q, K = (torch.zeros(1, 1, rows, 8, dtype=torch.float16, device=device) for rows in (2, 300))
    V = torch.full((1, 1, 300, 8), 65504.0, dtype=torch.float16, device=device)
    assert bool((attention(Q, K, V) == 65504).all())


@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_subnormal_inputs(scale: float, device: str) -> None:
    """Tiny numbers are numbers. Nothing turns denormals off."""
    inputs = {name: torch.full((1, 1, 2, 8), 2e-40, device=device) for name in "QKV"}
    Y = attention(**inputs, scale=scale)
    assert bool((Y > 1e-40).all()) if device == "cpu" else bool(Y.isfinite().all())
    assert float(torch.tensor(1e-40) * 0.5) > 0


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_float32_ignores_the_global_tf32_switch(head_size: int, device: str) -> None:
    """Full-precision products whatever torch.matmul may do. TF32's 2^-11 would be two hundred times over the limit."""
    case = Case(q_len=128, kv_len=512, head_size=head_size, batch=1)
    inputs = make_inputs(case, device)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        loose = attention(**inputs)
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(loose, attention(**inputs))
    exact = reference.attention(**inputs).Y
    relative = (loose.double() - exact).norm() / exact.norm()
    assert float(relative) < 2e-6


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-14), (torch.float32, 2e-6), (torch.float16, 6e-4), (torch.bfloat16, 5e-3)], ids=str
)
@pytest.mark.parametrize("features", [{}, {"is_causal": True}, {"mask": "same"}, {"softcap": 20.0}, {"q_len": 1, "kv_len": 2000}], ids=str)
def test_mean_error(dtype: torch.dtype, limit: float, features: dict[str, object], device: str) -> None:
    """Root mean square, not worst case: half a unit in the last place of the result and as much again for the weights."""
    case = Case(**{"dtype": dtype, "q_len": 64, "kv_len": 256, "head_size": 64} | features)
    inputs = make_inputs(case, device)
    exact = reference.attention(**inputs, **case.attributes()).Y
    error = (attention(**inputs, **case.attributes()).double() - exact).norm() / exact.norm()
    assert float(error) < limit


def test_tolerances_are_tight() -> None:
    """What the comparisons of this suite allow for usual inputs: relative to the largest value, head size 64 and 128."""
    for head_size in (64, 128):
        sizes = {"score": 1.5 * math.sqrt(head_size), "logit": 8.0, "value": 1.0, "keys": 256}
        assert tolerance(torch.float64, compute=torch.float64, **sizes).output < 5e-14
        assert tolerance(torch.float32, compute=torch.float32, **sizes).output < 1.2e-5
        assert tolerance(torch.float16, compute=torch.float32, **sizes).output < 1.1e-3
        assert tolerance(torch.bfloat16, compute=torch.float32, **sizes).output < 8.1e-3


def test_random_walk_of_lengths(device: str) -> None:
    """Long sums in float32 stay within their bound."""
    source = Source("long", device)
    Q, K, V = (source.normal(1, 1, rows, 16) for rows in (2, 20000, 20000))
    compare_attention({"Q": Q, "K": K, "V": V}, {"Y": attention(Q, K, V)})
