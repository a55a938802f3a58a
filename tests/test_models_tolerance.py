"""What a result may be off by: the numbers, and that good arithmetic stays within them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import Case, MhaCase, make_inputs, make_mha_inputs
from torch import Tensor

from torch_onnx_attn.call import Call
from torch_onnx_attn.tolerance import Allowance, allowances, deviation, fast_arithmetic, own_arithmetic, ratios, roundoff


def call_of_case(case: Case, device: str, outputs: tuple[str, ...] = ("Y",)) -> Call:
    attributes = case.attributes()
    if case.qk_matmul_output_mode is not None:
        attributes["qk_matmul_output_mode"] = case.qk_matmul_output_mode
        outputs += ("qk_matmul_output",)
    if case.past is not None:
        outputs += ("present_key", "present_value")
    return Call("attention", make_inputs(case, device), attributes, ("Y", "lse") if case.lse else outputs)


def worst(call: Call, arithmetic: torch.dtype) -> float:
    made, expected, allowed = call.run(), call.to("cpu").expected(), allowances(call, arithmetic, call.to("cpu").scale())
    return max(deviation(made[name].cpu(), expected[name], allowed[name]).ratio for name in call.outputs)


CASES = [
    Case(),
    Case(dtype=torch.float64),
    Case(dtype=torch.float16, q_len=129, kv_len=300, head_size=128, is_causal=True),
    Case(dtype=torch.bfloat16, layout="3d", v_head_size=24, softcap=2.0),
    Case(dtype=torch.float16, lengths="ragged", is_causal=True, mask="bool"),
    Case(past=7, mask="same", qk_matmul_output_mode=2, is_causal=True),
    Case(dtype=torch.float16, qk_matmul_output_mode=3, mask="same", left_window_size=2),
    Case(dtype=torch.bfloat16, qk_matmul_output_mode=1, softcap=1.5, layout="bshd"),
    Case(lse=True, mask="same"),
    Case(dtype=torch.float16, softmax_precision=11),
]


@pytest.mark.parametrize("case", CASES)
def test_the_op_is_within_what_its_arithmetic_allows(case: Case, device: str) -> None:
    call = call_of_case(case, device)
    assert worst(call, own_arithmetic(call)) <= 1


@pytest.mark.parametrize(
    "case",
    [
        MhaCase(bias=True, mask="keys", past=4),
        MhaCase(dtype=torch.float16, layout="packed_qkv", bias=True, qk=True, kv_len=5),
        MhaCase(dtype=torch.bfloat16, layout="packed_kv", attention_bias="bh"),
        MhaCase(past=3, capacity=12, kv_len=5),
        MhaCase(layout="bnsh", unidirectional=True, mask="rows"),
    ],
)
def test_mha_is_within_what_its_arithmetic_allows(case: MhaCase, device: str) -> None:
    outputs = ("output", *(("qk",) if case.qk else ()), *(("present_key", "present_value") if case.past else ()))
    call = Call("mha", make_mha_inputs(case, device), case.attributes(), outputs)
    assert worst(call, own_arithmetic(call)) <= 1


@pytest.mark.parametrize("case", [Case(), Case(dtype=torch.float16), Case(dtype=torch.bfloat16, head_size=64)])
def test_one_wrong_key_is_beyond_it(case: Case) -> None:
    """The last key left out, in one head of one entry: far beyond even what coarse arithmetic may lose."""
    call = call_of_case(case, "cpu")
    mask = torch.ones(2, 4, case.q_len, case.kv_len, dtype=torch.bool)
    mask[1, 2, :, -1] = False
    spoilt = Call("attention", {**call.tensors, "attn_mask": mask}, call.attributes, ("Y",)).run()["Y"]
    found = deviation(spoilt, call.expected()["Y"], allowances(call, fast_arithmetic(call))["Y"])
    assert found.ratio > 1 and found.where is not None and found.where[:2] == (1, 2)


def test_a_head_with_large_values_does_not_excuse_the_others() -> None:
    call = call_of_case(Case(q_heads=2, kv_heads=2), "cpu")
    call.tensors["V"][:, 1] *= 1e6
    made = call.run()["Y"]
    made[0, 0, 0, 0] += 1e-3
    assert not deviation(made, call.expected()["Y"], allowances(call, torch.float32)["Y"]).agrees


def test_arithmetic() -> None:
    def call(dtype: torch.dtype, **attributes: Any) -> Call:
        return Call("attention", {"Q": torch.zeros(1, 1, 1, 1, dtype=dtype)}, attributes, ("Y",))

    assert own_arithmetic(call(torch.float16)) == torch.float32 and fast_arithmetic(call(torch.float16)) == torch.float16
    assert own_arithmetic(call(torch.float64)) == fast_arithmetic(call(torch.float64)) == torch.float64
    assert own_arithmetic(call(torch.float32, softmax_precision=11)) == torch.float64
    assert fast_arithmetic(call(torch.float32, softmax_precision=10)) == torch.float16
    assert fast_arithmetic(call(torch.float32, softmax_precision=11)) == torch.float32
    assert roundoff(torch.float32) == 2**-24 and roundoff(torch.float16) == 2**-11 and roundoff(torch.bfloat16) == 2**-8
    assert roundoff(torch.int64) == 0


EXACT = Allowance(torch.zeros(()), 0.0, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool])
def test_copies_are_exact(dtype: torch.dtype) -> None:
    x = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    assert deviation(x, x, EXACT).ratio == 0
    other = x.clone()
    other[1, 0] = 0
    found = deviation(other, x, EXACT)
    assert found.ratio == math.inf and found.where == (1, 0) and not found.agrees


def test_infinities_and_nan() -> None:
    absolute = Allowance(torch.tensor(1.0), 0.0, torch.tensor(1.0))
    for value in (math.inf, -math.inf, math.nan):
        x = torch.tensor([0.0, value])
        assert deviation(x, x.double(), absolute).ratio == 0
        assert deviation(torch.zeros(2), x.double(), absolute).ratio == math.inf
        assert deviation(x, torch.zeros(2).double(), absolute).ratio == math.inf
    assert deviation(torch.tensor([math.inf]), torch.tensor([-math.inf]).double(), absolute).ratio == math.inf
    # What the type cannot hold is infinite in it.
    assert deviation(torch.tensor([math.inf]).half(), torch.tensor([1e6]).double(), absolute).ratio == 0


def test_shapes_and_empty_outputs() -> None:
    assert deviation(torch.zeros(2), torch.zeros(3).double(), EXACT).ratio == math.inf
    assert deviation(torch.zeros(0, 2), torch.zeros(0, 2).double(), EXACT).agrees


def test_what_is_ignored_does_not_count() -> None:
    x: Tensor = torch.tensor([1.0, math.nan])
    assert deviation(x, torch.ones(2).double(), EXACT, torch.tensor([False, True])).agrees
    assert not deviation(x, torch.ones(2).double(), EXACT, torch.tensor([True, False])).agrees


def test_units_are_rounding_errors_of_the_type() -> None:
    x = torch.tensor([[[[2.0]]]])
    allowance = Allowance(torch.full((1, 1, 1, 1), 1e-6), 0.0, torch.full((1, 1, 1, 1), 2.0**-24))
    found = deviation(x, x.double() + 3 * 2.0**-24, allowance)
    assert found.units == pytest.approx(3) and found.allowed_units == pytest.approx(1e-6 * 2**24, rel=1e-6)
    assert found.ratio == pytest.approx(found.units / found.allowed_units)
    assert float(ratios(x, x.double(), allowance)) == 0
