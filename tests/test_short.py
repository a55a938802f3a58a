"""Heads that fit into shared memory, at every size where the kernel for them changes: blocks of 64 rows, tiles of 64 keys; and more heads
than fit at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import Case, MhaCase, assert_same_bits, call_attention, call_mha, check_attention, check_mha, make_inputs, make_mha_inputs

from torch_onnx_attn import H200, explain, kernel

EDGES = (1, 2, 31, 63, 64, 65, 127, 128, 129, 192, 193, 256)
HALF, BRAIN = torch.float16, torch.bfloat16
SIZES = [Case(dtype=(HALF, BRAIN)[i % 2], q_len=q_len, kv_len=EDGES[-1 - i], head_size=64, lse=True) for i, q_len in enumerate(EDGES)]
SIZES += [Case(dtype=(BRAIN, HALF)[i % 2], q_len=128, kv_len=kv_len, head_size=64, is_causal=True) for i, kv_len in enumerate(EDGES)]
SIZES += [Case(dtype=HALF, q_len=q_len, kv_len=128, head_size=128, is_causal=True, lse=True) for q_len in (1, 63, 64, 65, 128)]
FEATURES = [
    Case(dtype=HALF, q_len=128, kv_len=128, head_size=64, batch=3, lengths="ragged", lse=True),
    Case(dtype=BRAIN, q_len=100, kv_len=130, head_size=64, batch=5, lengths="ragged", is_causal=True, lse=True),
    Case(dtype=HALF, q_len=65, kv_len=200, head_size=32, left_window_size=20, right_window_size=5, layout="3d"),
    Case(dtype=HALF, q_len=128, kv_len=128, head_size=64, layout="bshd", q_heads=6, kv_heads=3, batch=7),
    Case(dtype=BRAIN, q_len=128, kv_len=128, head_size=96, layout="bshd", v_head_size=72),
    Case(dtype=HALF, q_len=130, kv_len=70, head_size=40, v_head_size=64, past=30, is_causal=True),
    Case(dtype=BRAIN, q_len=128, kv_len=128, head_size=64, scale=0.0, lse=True),
    Case(dtype=HALF, q_len=128, kv_len=128, head_size=128, scale=3.0),
    *(
        Case(dtype=HALF, q_len=128, kv_len=128, head_size=64, mask="bool", mask_axes=axes, lse=True)
        for axes in ("b11k", "bh1k", "11k", "1k")
    ),
    Case(
        dtype=BRAIN, q_len=70, kv_len=200, head_size=64, mask="bool", mask_axes="b11k", mask_columns=131, is_causal=True, lengths="ragged"
    ),
    Case(dtype=BRAIN, q_len=128, kv_len=128, head_size=64, mask="same", mask_axes="b11k", lse=True),
    Case(dtype=HALF, q_len=128, kv_len=100, head_size=128, mask="float32", mask_axes="bh1k", is_causal=True),
    Case(dtype=HALF, q_len=90, kv_len=250, head_size=64, mask="int32", mask_axes="b11k"),
]
MANY = [  # more heads than the slots of a thread block hold, on 132 multiprocessors
    Case(dtype=HALF, batch=67, q_heads=12, kv_heads=12, q_len=65, kv_len=100, head_size=64, lengths="ragged", lse=True),
    Case(dtype=BRAIN, batch=50, q_heads=12, kv_heads=4, q_len=40, kv_len=200, head_size=32, mask="bool", mask_axes="b11k", lse=True),
    Case(dtype=HALF, batch=35, q_heads=12, kv_heads=12, q_len=256, kv_len=256, head_size=64, is_causal=True, left_window_size=90),
    Case(dtype=BRAIN, batch=35, q_heads=16, kv_heads=8, q_len=128, kv_len=128, head_size=128, is_causal=True),
    Case(dtype=HALF, batch=300, q_heads=8, kv_heads=8, q_len=20, kv_len=60, head_size=64, mask="same", mask_axes="b11k"),
]
PADDED = [
    *(MhaCase(dtype=HALF, batch=3, q_len=128, kv_len=128, head_size=64, mask=mask) for mask in ("lengths", "lengths_starts", "keys")),
    MhaCase(dtype=BRAIN, batch=3, q_len=65, kv_len=129, head_size=32, mask="keys", mask_dtype=torch.bool, layout="packed_kv"),
    MhaCase(dtype=HALF, batch=3, q_len=128, kv_len=128, head_size=64, mask="keys", layout="packed_qkv", unidirectional=True),
    MhaCase(dtype=HALF, batch=3, q_len=100, kv_len=100, head_size=128, mask="lengths", mask_filter_value=-1e30),
]


@contextlib.contextmanager
def short_kernel(device: str) -> Iterator[None]:
    """Forces it where there is one."""
    has_one = device == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    with kernel("forward_short") if has_one else contextlib.nullcontext():
        yield


@pytest.mark.parametrize("case", SIZES + FEATURES + MANY, ids=str)
def test_attention(case: Case, device: str) -> None:
    with short_kernel(device):
        check_attention(case, device)


@pytest.mark.parametrize("case", PADDED, ids=str)
def test_mha(case: MhaCase, device: str) -> None:
    with short_kernel(device):
        check_mha(case, device)


@pytest.mark.parametrize("case", [case for case in SIZES + FEATURES + MANY if case.q_len > 16], ids=str)
def test_attention_takes_the_kernel(case: Case) -> None:
    plan = explain(call_attention, make_inputs(case), lse=case.lse, machine=H200, **case.attributes())
    assert plan.kernel == "forward_short" and set(plan.refusals) == {"decode"}


@pytest.mark.parametrize("case", PADDED, ids=str)
def test_mha_takes_the_kernel(case: MhaCase) -> None:
    inputs = make_mha_inputs(case)
    plan = explain(call_mha, inputs, machine=H200, **case.attributes())
    assert plan.kernel == "forward_short"


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"q_len": 257}, "more than 256 queries"),
        ({"kv_len": 257}, "more than 256 keys"),
        ({"head_size": 136}, "a head size is above 128"),
        ({"head_size": 128, "q_len": 192, "kv_len": 192}, "two heads do not fit"),
        ({"head_size": 60}, "not a multiple of 8"),
        ({"softcap": 5.0}, "softcap"),
        ({"mask": "bool"}, "the mask has a query axis"),
        ({"dtype": torch.float32}, "neither float16 nor bfloat16"),
    ],
    ids=str,
)
def test_what_it_refuses(change: dict[str, Any], reason: str) -> None:
    case = Case(**({"dtype": HALF, "q_len": 128, "kv_len": 128, "head_size": 64} | change))
    plan = explain(call_attention, make_inputs(case), machine=H200, **case.attributes())
    assert plan.kernel != "forward_short" and reason in plan.refusals["forward_short"]


@pytest.mark.parametrize("heads", [1, 2, 12])
def test_bits_do_not_depend_on_how_many_heads_there_are(heads: int, device: str) -> None:
    """A head to a thread block, or six in turn."""
    many = make_inputs(Case(dtype=HALF, batch=60, q_heads=12, kv_heads=12, q_len=128, kv_len=128, head_size=64), device)
    few = {name: tensor[-1:, :heads].contiguous() for name, tensor in many.items()}
    with short_kernel(device):
        expected = call_attention(many)["Y"][-1:, :heads]
        assert_same_bits("Y", call_attention(few)["Y"], expected)
