"""Masks without a query axis: kept keys side by side are a range to the fast kernels, others are looked up one by one."""

from __future__ import annotations

import pytest
import torch
from cases import Case, MhaCase, assert_same_bits, call_attention, check_mha, compare_attention, make_inputs
from torch import Tensor

KV_LEN = 400
SHAPES = [
    Case(dtype=torch.float16, batch=4, q_len=65, kv_len=KV_LEN, head_size=64),  # fewer rows than the larger tile has
    Case(dtype=torch.bfloat16, batch=4, q_len=330, kv_len=KV_LEN, head_size=64, lse=True),
    Case(dtype=torch.float16, batch=4, q_len=200, kv_len=KV_LEN, head_size=128, is_causal=True),
    Case(dtype=torch.bfloat16, batch=4, q_len=130, kv_len=KV_LEN, head_size=256, lengths="ragged"),
    Case(dtype=torch.float16, batch=4, q_len=200, kv_len=KV_LEN, head_size=128, left_window_size=70, is_causal=True),
    Case(dtype=torch.float16, batch=4, q_len=130, kv_len=KV_LEN, head_size=96, softcap=5.0),
]


def kept(pattern: str, columns: int = KV_LEN) -> Tensor:
    """bool [4, columns]: which keys each batch entry keeps."""
    key = torch.arange(columns)
    if pattern == "right padding":
        return key < torch.tensor([[columns], [1], [129], [300]])
    if pattern == "left padding":
        return key >= torch.tensor([[0], [columns - 1], [130], [256]])
    if pattern == "middle":
        return (key >= torch.tensor([[10], [127], [128], [0]])) & (key < torch.tensor([[20], [129], [256], [0]]))  # the last keeps none
    gaps = torch.rand(4, columns) > 0.4
    gaps[1, 50:-50] = False  # tiles in the middle without a kept key
    return gaps


def compare(case: Case, mask: Tensor, device: str) -> None:
    inputs = make_inputs(case, device) | {"attn_mask": mask.to(device)}
    compare_attention(inputs, call_attention(inputs, None, case.lse, **case.attributes()), **case.attributes())


@pytest.mark.parametrize("pattern", ["right padding", "left padding", "middle", "gaps"])
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_bool(case: Case, pattern: str, device: str) -> None:
    compare(case, kept(pattern)[:, None, None], device)


@pytest.mark.parametrize("columns", [399, 257, 16])
@pytest.mark.parametrize("pattern", ["right padding", "gaps"])
def test_fewer_columns_and_unaligned_rows(pattern: str, columns: int, device: str) -> None:
    case = Case(dtype=torch.float16, batch=4, q_len=200, kv_len=KV_LEN, head_size=64)
    compare(case, kept(pattern)[:, None, None, :columns].contiguous(), device)


@pytest.mark.parametrize("lowest", [float("-inf"), -1e5, -1e9, -1e30, torch.finfo(torch.bfloat16).min])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_size", [64, 128])
def test_bias(lowest: float, dtype: torch.dtype, head_size: int, device: str) -> None:
    """Minima that are finite: a row of nothing else is an ordinary softmax."""
    case = Case(dtype=torch.bfloat16, batch=4, q_len=200, kv_len=KV_LEN, head_size=head_size)
    compare(case, torch.where(kept("middle"), 0.5, lowest)[:, None, None].to(dtype), device)


@pytest.mark.parametrize("largest", [1e5, 1e30])
def test_bias_far_above(largest: float, device: str) -> None:
    case = Case(dtype=torch.float16, batch=4, q_len=200, kv_len=KV_LEN, head_size=64)
    compare(case, torch.where(kept("middle"), largest, 0.5)[:, None, None].expand(-1, 1, 200, -1).contiguous(), device)


@pytest.mark.parametrize("pattern", ["right padding", "gaps"])
def test_batch_entries_alone(pattern: str, device: str) -> None:
    """Bits do not depend on the entries beside, whatever they let the kernel skip."""
    case = SHAPES[1]
    inputs = make_inputs(case, device) | {"attn_mask": kept(pattern)[:, None, None].to(device)}
    together = call_attention(inputs, None, case.lse, **case.attributes())
    for entry in range(4):
        alone = call_attention({name: x[entry : entry + 1] for name, x in inputs.items()}, None, case.lse, **case.attributes())
        for name, output in alone.items():
            assert_same_bits(f"{name} of entry {entry}", output, together[name][entry : entry + 1])


@pytest.mark.parametrize("mask", ["keys", "lengths"])
@pytest.mark.parametrize("filter_value", [-10000.0, -1e5, -1e9, -1e30, torch.finfo(torch.float32).min, float("-inf")])
def test_padding_adds(mask: str, filter_value: float, device: str) -> None:
    check_mha(MhaCase(dtype=torch.float16, batch=4, q_len=200, kv_len=300, head_size=64, mask=mask, mask_filter_value=filter_value), device)
