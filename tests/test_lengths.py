"""nonpad_kv_seqlen: the valid keys of each batch entry. What lies past them may be anything and never matters."""

from __future__ import annotations

import pytest
import torch
from cases import FLOAT_DTYPES, INF, NAN, Case, assert_same_bits, check_attention, compare_attention, make_inputs, poison_past
from visibility import probe, seen

attention = torch.ops.onnx_attn.attention


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("q_len", [1, 4, 70])
@pytest.mark.parametrize("kv_len", [1, 64, 130, 300])
def test_ragged(dtype: torch.dtype, q_len: int, kv_len: int, device: str) -> None:
    """The Case keeps NaN in K and inf in V past every length."""
    check_attention(Case(dtype=dtype, batch=6, q_len=q_len, kv_len=kv_len, head_size=32, lengths="ragged"), device)


@pytest.mark.parametrize("layout", ["bshd", "3d", "loose"])
def test_layouts(layout: str, device: str) -> None:
    check_attention(Case(dtype=torch.float16, batch=5, layout=layout, q_len=3, kv_len=70, lengths="ragged"), device)


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_tail(poison: float, dtype: torch.dtype, device: str) -> None:
    inputs = make_inputs(Case(dtype=dtype, batch=4, q_len=2, kv_len=100, head_size=64), device)
    lengths = torch.tensor([0, 1, 63, 100], device=device)
    clean = attention(**inputs, nonpad_kv_seqlen=lengths)
    tails = {name: poison_past(inputs[name], lengths, poison) for name in ("K", "V")}
    assert_same_bits("Y", attention(**inputs | tails, nonpad_kv_seqlen=lengths), clean)


def test_empty_entries_are_zero_and_leave_the_others_alone(device: str) -> None:
    Y = attention(**probe(2, 3, batch=3, device=device), nonpad_kv_seqlen=torch.tensor([0, 3, 0], device=device))
    assert seen(Y) == [["...", "..."], ["###", "###"], ["...", "..."]]


def test_full_lengths_are_no_lengths(device: str) -> None:
    inputs = make_inputs(Case(q_len=9, kv_len=70), device)
    Y = attention(**inputs, nonpad_kv_seqlen=torch.tensor([70, 70], device=device))
    torch.testing.assert_close(Y, attention(**inputs), atol=5e-6, rtol=5e-6)


def test_capacity_does_not_matter(device: str) -> None:
    """A buffer of 500 rows of which 70 are valid equals a buffer of 70."""
    inputs = make_inputs(Case(q_len=2, kv_len=500, head_size=32), device)
    exact = {name: inputs[name][:, :, :70] for name in ("K", "V")}
    lengths = torch.tensor([70, 70], device=device)
    Y = attention(**inputs, nonpad_kv_seqlen=lengths, is_causal=True)
    compare_attention(inputs | exact | {"nonpad_kv_seqlen": lengths}, {"Y": Y}, is_causal=True)


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_score_outputs(mode: int, device: str) -> None:
    """Modes 0 and 1 show the product with whatever the cache holds, NaN included; 2 shows -inf there and 3 shows 0."""
    actual = check_attention(Case(batch=5, q_len=3, kv_len=70, lengths="ragged", softcap=2.0, qk_matmul_output_mode=mode), device)
    scores = actual["qk_matmul_output"]
    assert bool(scores.isnan().any()) == (mode in (0, 1))


def test_strided_lengths(device: str) -> None:
    inputs = make_inputs(Case(batch=3, q_len=2, kv_len=9), device)
    lengths = torch.tensor([[3, 99], [0, 99], [9, 99]], device=device)[:, 0]
    assert lengths.stride(0) == 2
    compare_attention(inputs | {"nonpad_kv_seqlen": lengths}, {"Y": attention(**inputs, nonpad_kv_seqlen=lengths)})
    same = torch.tensor([4], device=device).expand(3)
    compare_attention(inputs | {"nonpad_kv_seqlen": same}, {"Y": attention(**inputs, nonpad_kv_seqlen=same)})


def test_longer_than_the_mask(device: str) -> None:
    """A mask shorter than a length excludes the rest: both limits hold."""
    mask = torch.tensor([[True, False, True]], device=device)
    Y = attention(**probe(1, 6, batch=2, device=device), attn_mask=mask, nonpad_kv_seqlen=torch.tensor([5, 1], device=device))
    assert seen(Y) == [["#.#..."], ["#....."]]


@pytest.mark.gpu
def test_out_of_range_is_clamped_on_the_device() -> None:
    """The host never reads lengths there, so it cannot complain; nothing outside the buffers is read."""
    inputs = make_inputs(Case(batch=4, q_len=2, kv_len=9), "cuda")
    lengths = torch.tensor([-5, 9, 10, 2**40], device="cuda")
    for is_causal in (False, True):
        compare_attention(
            inputs | {"nonpad_kv_seqlen": lengths},
            {"Y": attention(**inputs, nonpad_kv_seqlen=lengths, is_causal=is_causal)},
            is_causal=is_causal,
        )
