"""Layouts: any strides are read in place where the last axis is contiguous, others are copied; outputs have fixed strides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import FLOAT_DTYPES, Case, call_attention, check_attention, compare_attention, loose, make_inputs
from torch import Tensor

attention = torch.ops.onnx_attn.attention


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["bshd", "3d", "loose"])
@pytest.mark.parametrize(
    "features", [{}, {"past": 20, "is_causal": True}, {"lengths": "ragged", "batch": 5}, {"q_len": 1, "kv_len": 300}], ids=str
)
@pytest.mark.parametrize("head_size", [33, 64])
def test_layouts(dtype: torch.dtype, layout: str, features: dict[str, object], head_size: int, device: str) -> None:
    check_attention(Case(**{"dtype": dtype, "layout": layout, "head_size": head_size, "q_len": 17, "kv_len": 40} | features), device)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "odd offset": lambda x: torch.cat([x.new_full((1,), float("nan")), x.flatten()])[1:].view(x.shape),
    "last axis strided": lambda x: torch.stack([x, x + 1], -1)[..., 0],
    "last axis not last": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "batch innermost": lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "rows outermost": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "loose": loose,
    "one row for all": lambda x: x[:, :, :1].expand_as(x),
    "one head for all": lambda x: x[:, :1].expand_as(x),
    "one entry for all": lambda x: x[:1].expand_as(x),
    "one column for all": lambda x: x[..., :1].expand_as(x),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("names", ["Q", "K", "V", "QKV"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_views(view: str, names: str, dtype: torch.dtype, device: str) -> None:
    inputs = make_inputs(Case(dtype=dtype, batch=3, q_heads=4, kv_heads=2, q_len=10, kv_len=70, head_size=64), device)
    inputs |= {name: VIEWS[view](inputs[name]) for name in names}
    compare_attention(inputs, {"Y": attention(**inputs)})


@pytest.mark.parametrize("view", ["odd offset", "last axis strided", "last axis not last", "loose", "one head for all"])
@pytest.mark.parametrize("mode", [None, 2])
def test_views_of_the_past(view: str, mode: int | None, device: str) -> None:
    inputs = make_inputs(Case(dtype=torch.bfloat16, past=37, q_len=3, kv_len=3, head_size=32), device)
    inputs |= {name: VIEWS[view](inputs[name]) for name in ("past_key", "past_value")}
    compare_attention(inputs, call_attention(inputs, mode), mode)


def test_packed_projection(device: str) -> None:
    """Q, K and V as slices of one projection, both orders of packing."""
    for dtype in (torch.float32, torch.bfloat16):
        packed = torch.randn(2, 50, 3, 4, 64).to(device, dtype)
        inputs = dict(zip("QKV", (part.transpose(1, 2) for part in packed.unbind(2)), strict=True))
        compare_attention(inputs, {"Y": attention(**inputs, is_causal=True)}, is_causal=True)
        packed = torch.randn(2, 50, 4, 3, 64).to(device, dtype)
        inputs = dict(zip("QKV", (part.transpose(1, 2) for part in packed.unbind(3)), strict=True))
        compare_attention(inputs, {"Y": attention(**inputs)})
        inputs = dict(zip("QKV", torch.randn(2, 50, 3 * 256).to(device, dtype).chunk(3, -1), strict=True))
        heads = {"q_num_heads": 4, "kv_num_heads": 4}
        compare_attention(inputs, {"Y": attention(**inputs, **heads)}, **heads)


@pytest.mark.parametrize("features", [{}, {"q_len": 1}, {"q_heads": 1, "kv_heads": 1}, {"batch": 1}], ids=str)
def test_output_follows_the_axis_order_of_Q(features: dict[str, int], device: str) -> None:
    def case(layout: str) -> Case:
        return Case(**{"layout": layout, "q_len": 6, "q_heads": 4, "v_head_size": 24} | features)

    Y = attention(**make_inputs(case("bhsd"), device))
    assert Y.is_contiguous()
    Y = attention(**make_inputs(case("bshd"), device))
    assert Y.transpose(1, 2).is_contiguous()
    Y = attention(**make_inputs(case("3d"), device), q_num_heads=case("3d").q_heads, kv_num_heads=case("3d").kv_heads)
    assert Y.dim() == 3 and Y.is_contiguous()


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "3d", "loose"])
def test_other_outputs_are_contiguous(layout: str, device: str) -> None:
    case = Case(layout=layout, past=4, q_len=6)
    outputs = call_attention(make_inputs(case, device), 0, **case.attributes())
    assert all(outputs[name].is_contiguous() for name in ("present_key", "present_value", "qk_matmul_output"))
