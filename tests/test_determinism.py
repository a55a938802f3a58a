"""The same bits from run to run, for any number of CPU threads, and for any batch that a row happens to be in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import Case, MhaCase, assert_same_bits, call_attention, call_mha, make_inputs, make_mha_inputs, threads
from torch import Tensor

CASES = [
    Case(dtype=torch.float32, batch=5, q_len=70, kv_len=130, head_size=64),
    Case(dtype=torch.float16, batch=5, q_len=130, kv_len=130, head_size=64, is_causal=True, mask="bool", mask_axes="b1qk"),
    Case(dtype=torch.bfloat16, batch=5, q_len=65, kv_len=300, head_size=128, mask="same", softcap=20.0),
    Case(dtype=torch.float64, batch=5, q_len=9, kv_len=300, head_size=37),
    Case(dtype=torch.float32, batch=5, q_len=20, kv_len=200, head_size=300, left_window_size=50),
    # Decode steps over more keys than any one block takes, so that the split over keys is exercised.
    Case(dtype=torch.bfloat16, batch=5, q_heads=8, kv_heads=2, q_len=1, kv_len=4097, head_size=64, lengths="ragged", is_causal=True),
    Case(dtype=torch.float16, batch=5, q_heads=8, kv_heads=1, q_len=1, kv_len=4097, head_size=128),
    Case(
        dtype=torch.float32,
        batch=5,
        q_heads=4,
        kv_heads=4,
        q_len=3,
        kv_len=4097,
        head_size=64,
        left_window_size=3000,
        is_causal=True,
        lengths="full",
    ),
    Case(dtype=torch.bfloat16, batch=5, q_heads=8, kv_heads=2, q_len=1, kv_len=4097, head_size=64, mask="bool", mask_axes="bhqk"),
    Case(dtype=torch.float16, batch=5, q_len=2, kv_len=2, past=2500, head_size=64, is_causal=True),
    Case(dtype=torch.bfloat16, batch=5, q_len=33, kv_len=70, qk_matmul_output_mode=3, is_causal=True),
    Case(dtype=torch.float16, batch=5, q_len=4, kv_len=4097, head_size=64, lse=True),
]
MHA_CASES = [
    MhaCase(dtype=torch.float16, batch=4, q_len=70, kv_len=70, head_size=64, mask="keys", bias=True),
    MhaCase(dtype=torch.float32, batch=4, q_len=1, kv_len=1, past=3000, capacity=4100, head_size=64, attention_bias="bh"),
    MhaCase(dtype=torch.bfloat16, batch=4, q_len=33, kv_len=90, head_size=64, attention_bias="h", unidirectional=True),
]


def run(case: Case | MhaCase, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    if isinstance(case, MhaCase):
        return call_mha(inputs, case.qk, **case.attributes())
    return call_attention(inputs, case.qk_matmul_output_mode, case.lse, **case.attributes())


def inputs_of(case: Case | MhaCase, device: str) -> dict[str, Tensor]:
    return make_mha_inputs(case, device) if isinstance(case, MhaCase) else make_inputs(case, device)


@pytest.mark.parametrize("case", [*CASES, *MHA_CASES], ids=str)
def test_runs(case: Case | MhaCase, device: str) -> None:
    inputs = inputs_of(case, device)
    first = run(case, inputs)
    for _ in range(10 if device == "cuda" else 3):
        for name, again in run(case, inputs).items():
            assert_same_bits(name, again, first[name])


@pytest.mark.parametrize("case", [*CASES, *MHA_CASES], ids=str)
def test_threads(case: Case | MhaCase) -> None:
    inputs = inputs_of(case, "cpu")
    with threads(1):
        first = run(case, inputs)
    for count in (2, 3, 5):
        with threads(count):
            for name, again in run(case, inputs).items():
                assert_same_bits(f"{name} with {count} threads", again, first[name])


def entries(inputs: dict[str, Tensor], rows: Any, batch: int) -> dict[str, Tensor]:
    """The inputs of some batch entries; tensors without a batch axis stay."""
    return {name: x[rows] if x.dim() > 0 and x.shape[0] == batch else x for name, x in inputs.items()}


@pytest.mark.parametrize("case", [*CASES, *MHA_CASES], ids=str)
def test_batch_does_not_matter(case: Case | MhaCase, device: str) -> None:
    """A row alone, in the company of one other, in another order, and among many copies."""
    inputs = inputs_of(case, device)
    whole = run(case, inputs)
    batch = case.batch
    order = torch.arange(batch).roll(2).to(device)
    companies = [[entry] for entry in range(batch)] + [[1, 0], order.tolist(), [3] * 17 + [0]]
    for company in companies:
        rows = torch.tensor(company, device=device)
        for name, part in run(case, entries(inputs, rows, batch)).items():
            assert_same_bits(f"{name} of entries {company}", part, whole[name][rows])


def test_what_others_hold_does_not_matter(device: str) -> None:
    """NaN in one entry stays there."""
    case = Case(dtype=torch.bfloat16, batch=3, q_len=2, kv_len=1030, head_size=64, lengths="full")
    inputs = make_inputs(case, device)
    before = run(case, inputs)["Y"]
    for name in ("Q", "K", "V"):
        inputs[name][1] = float("nan")
    after = run(case, inputs)["Y"]
    assert_same_bits("Y", after[[0, 2]], before[[0, 2]])


def test_groups_of_heads_are_independent(device: str) -> None:
    """A group of heads computed alone is what it is among others."""
    case = Case(dtype=torch.float16, q_heads=8, kv_heads=4, q_len=1, kv_len=1500, head_size=64)
    inputs = make_inputs(case, device)
    whole = run(case, inputs)["Y"]
    part = {"Q": inputs["Q"][:, 2:4], "K": inputs["K"][:, 1:2], "V": inputs["V"][:, 1:2]}
    torch.testing.assert_close(run(case, part)["Y"], whole[:, 2:4], atol=2e-3, rtol=0)
