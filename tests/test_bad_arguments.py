"""Arguments of the wrong kind to the functions around the ops: each error names the argument, what was given and what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import torch_onnx_attn.onnx
from torch_onnx_attn import onnx as exporting
from torch_onnx_attn import record
from torch_onnx_attn.bad_input import BadInput
from torch_onnx_attn.models import find_nodes, inspect, load_node, verify
from torch_onnx_attn.models.rewrite import rewrite, rewrite_file
from torch_onnx_attn.onnx import ExportError, PastPresent

Q = torch.randn(1, 2, 4, 8)


class Model(torch.nn.Module):
    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return torch_onnx_attn.attention(q, q, q).Y


MODEL, CACHES = Model().eval(), PastPresent(1, 2, 8)
EXPORTS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "args": (lambda: exporting.export(MODEL, None), TypeError, "args: is of type NoneType, must be a tuple"),
    "shapes": (
        lambda: exporting.export(MODEL, (Q,), dynamic_shapes="batch"),
        TypeError,
        "dynamic_shapes: is 'batch', must give the axes of each input",
    ),
    "table": (lambda: exporting.translation_table("24"), ExportError, "opset='24': must be an integer"),
    "tidy": (lambda: exporting.tidy(None), TypeError, "program: is of type NoneType, must be what export"),
    "check": (lambda: exporting.check("a.onnx", None), TypeError, "program: is of type str, must be what export"),
    "decoder": (lambda: exporting.export_past_present(3, (Q,), CACHES), TypeError, r"model: is of type int, must be a torch\.nn\.Module"),
    "decoder_args": (lambda: exporting.export_past_present(MODEL, Q, CACHES), TypeError, "args: is of type Tensor, must be a tuple"),
    "static": (lambda: exporting.export_static_cache(3, (Q,)), TypeError, r"model: is of type int, must be a torch\.nn\.Module"),
    "static_args": (lambda: exporting.export_static_cache(MODEL, Q), TypeError, "args: is of type Tensor, must be a tuple"),
}


@pytest.mark.parametrize("name", EXPORTS)
def test_export(name: str) -> None:
    call, kind, message = EXPORTS[name]
    with pytest.raises(kind, match=f"^{message}"):
        call()


@pytest.mark.parametrize("path", [None, 3])
def test_what_is_no_path(path: Any) -> None:
    given = f"is of type {type(path).__name__}, must be the path of an ONNX file"
    for function in (verify, inspect):
        with pytest.raises(BadInput, match=f"^path: {given}"):
            function(path)
    for argument, paths in (("source", (path, "out.onnx")), ("destination", ("in.onnx", path))):
        with pytest.raises(BadInput, match=f"^{argument}: {given}"):
            rewrite_file(*paths)


def test_verify(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    torch_onnx_attn.onnx.export(MODEL, (Q,), path)
    with pytest.raises(BadInput, match=r"^device: is 'tpu', which cannot be used here: "):
        verify(path, device="tpu")
    with pytest.raises(BadInput, match=r"^inputs: 'q' is of type str, must be a NumPy array"):
        verify(path, {"q": "hello"})
    assert not verify(path, {"q": np.zeros((1, 2, 4, 8), np.float32)}).failures()


def test_what_is_no_model() -> None:
    with pytest.raises(BadInput, match=r"^model: is of type int, must be what open_model returned"):
        load_node(3, "node")
    with pytest.raises(BadInput, match=r"^model: is of type NoneType, must be what open_model returned"):
        find_nodes(None)
    with pytest.raises(BadInput, match=r"^model: is of type str, must be an onnx_ir\.Model"):
        rewrite("in.onnx")


@pytest.mark.parametrize("call", [-1, "0", None])
def test_record(tmp_path: Path, call: Any) -> None:
    with pytest.raises(BadInput, match=f"^call: is {call!r}; calls are counted from 0"), record.record(tmp_path / "call.npz", call):
        pass


@pytest.mark.parametrize("repeats", [0, "3"])
def test_replay(repeats: Any) -> None:
    with pytest.raises(BadInput, match=f"^repeats: is {repeats!r}, must be an integer from 1 on"):
        record.replay("call.npz", repeats=repeats)
