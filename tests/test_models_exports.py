"""What this package exports is verified and inspected: models of several nodes, with caches, windows and both operators."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from export_support import Call, ort, to_numpy
from torch import Tensor

import torch_onnx_attn
from torch_onnx_attn.models import inspect, verify

Model = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def decode_step(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """A step on static caches: TensorScatter twice, then Attention."""
    Y = torch_onnx_attn.attention_cached(
        given["Q"], given["K"], given["V"], given["key_cache"], given["value_cache"], given["cache_lengths"], is_causal=True
    )
    return {"Y": Y, "new_key_cache": given["key_cache"], "new_value_cache": given["value_cache"]}


def window_after_past(given: dict[str, Tensor]) -> dict[str, Tensor]:
    first = torch_onnx_attn.attention(given["Q"], given["K"], given["V"], is_causal=True, left_window_size=2)
    second = torch_onnx_attn.attention(
        first.Y, given["K"], given["V"], past_key=given["past_key"], past_value=given["past_value"], softcap=5.0, is_causal=True
    )
    assert second.present_key is not None and second.present_value is not None
    return {"Y": second.Y, "present_key": second.present_key, "present_value": second.present_value}


def encoder(given: dict[str, Tensor]) -> dict[str, Tensor]:
    x = given["x"]
    for _ in range(3):
        x = x + torch_onnx_attn.mha(x, x, x, given["bias"], given["mask"], num_heads=4).output
    return {"y": x}


def heads(rows: int, count: int = 4) -> Tensor:
    return torch.randn(2, count, rows, 16)


MODELS: dict[str, tuple[Model, Callable[[], dict[str, Tensor]], list[str], int | None]] = {
    "decode step": (
        decode_step,
        lambda: {
            **{"Q": heads(2), "K": heads(2, 2), "V": heads(2, 2), "key_cache": heads(9, 2), "value_cache": heads(9, 2)},
            "cache_lengths": torch.tensor([3, 6]),
        },
        ["ai.onnx::TensorScatter-24", "ai.onnx::TensorScatter-24", "ai.onnx::Attention-24"],
        24,
    ),
    "window after past": (
        window_after_past,
        lambda: {"Q": heads(5), "K": heads(5), "V": heads(5), "past_key": heads(3), "past_value": heads(3)},
        ["ai.onnx::Attention-25", "ai.onnx::Attention-25"],
        25,
    ),
    "encoder": (
        encoder,
        lambda: {"x": torch.randn(2, 6, 32), "bias": torch.randn(96), "mask": torch.tensor([6, 3], dtype=torch.int32)},
        ["com.microsoft::MultiHeadAttention-1"] * 3,
        None,
    ),
}


@pytest.mark.parametrize("name, dtype", [("decode step", torch.float16), ("window after past", torch.float32), ("encoder", torch.float32)])
def test_exports_are_verified(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    function, make, operators, opset = MODELS[name]
    inputs = {key: tensor.to(dtype) if tensor.is_floating_point() else tensor for key, tensor in make().items()}
    path = tmp_path / "model.onnx"
    outputs = list(function({key: tensor.clone() for key, tensor in inputs.items()}))
    arguments = tuple(tensor.clone() for tensor in inputs.values())
    torch_onnx_attn.onnx.export(Call(list(inputs), function).eval(), arguments, path, input_names=list(inputs), output_names=outputs)
    arrays: dict[str, Any] = {key: to_numpy(tensor) for key, tensor in inputs.items()}
    result = verify(path, arrays)
    assert [node.operator for node in result.nodes] == operators
    if tuple(int(part) for part in ort.__version__.split(".")[:2]) >= (1, 32):
        assert [node.status for node in result.nodes] == ["agree"] * len(operators)
        assert all("onnxruntime" in node.outputs[0].deviations for node in result.nodes)
    else:
        assert result.failures() == []
    found = inspect(path, machine=torch_onnx_attn.H200)
    assert found.needed_opset == opset
    assert all((node.plan is not None) != (node.operator == "ai.onnx::TensorScatter-24") for node in found.nodes)
