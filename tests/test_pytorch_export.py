"""torch.export and AOTInductor: graphs keep the ops whole."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case, assert_same_bits, make_inputs
from sample_calls import FUNCTIONAL, run, samples
from torch import Tensor

ops = torch.ops.onnx_attn


class Decoder(torch.nn.Module):
    """One step over a static cache, then attention with a mask and with a past: mutable and pure ops in one graph."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.register_buffer("key_cache", torch.zeros(2, 2, 20, 16, device=device))
        self.register_buffer("value_cache", torch.zeros(2, 2, 20, 16, device=device))

    def forward(self, Q: Tensor, K: Tensor, V: Tensor, mask: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        Y = ops.attention_cached(Q, K, V, self.key_cache, self.value_cache, lengths, is_causal=True)
        masked, scores = ops.attention.qk(Y, K, V, mask, qk_matmul_output_mode=3)
        hidden = masked.transpose(1, 2).flatten(2)
        return ops.mha(hidden, hidden, hidden, num_heads=4, unidirectional=True), scores


def decoder_inputs(device: str, rows: int = 3) -> tuple[Tensor, ...]:
    inputs = make_inputs(Case(q_len=rows, kv_len=rows, mask="bool", mask_axes="qk"), device)
    return inputs["Q"], inputs["K"], inputs["V"], inputs["attn_mask"], torch.tensor([4, 0], device=device)


def test_export(device: str) -> None:
    """Dynamic lengths; the buffers that the graph writes are updated at each call; the ops stay whole in the graph."""
    rows = torch.export.Dim("rows", min=2, max=10)
    dynamic = ({2: rows}, {2: rows}, {2: rows}, {0: rows, 1: rows}, None)
    program = torch.export.export(Decoder(device), decoder_inputs(device), dynamic_shapes=dynamic, strict=False)
    called = [str(node.target) for node in program.graph.nodes if "onnx_attn" in str(node.target)]
    assert {"onnx_attn.attention.qk", "onnx_attn.mha.default"} <= set(called)
    exported = program.module()
    eager = Decoder(device)
    for rows_now in (3, 7):
        arguments = decoder_inputs(device, rows_now)
        for actual, expected in zip(exported(*arguments), eager(*arguments), strict=True):
            torch.testing.assert_close(actual, expected, atol=5e-6, rtol=5e-6)
    buffers = dict(exported.named_buffers())
    assert_same_bits("key_cache", buffers["key_cache"], eager.key_cache)


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_export_every_functional_overload(name: str) -> None:
    op, arguments = samples()[name]
    tensors = {key: x for key, x in arguments.items() if isinstance(x, Tensor)}
    others = {key: x for key, x in arguments.items() if key not in tensors}

    class Module(torch.nn.Module):
        def forward(self, **tensors: Tensor) -> Any:
            return op(**tensors, **others)

    program = torch.export.export(Module(), (), tensors, strict=False)
    assert [node.target for node in program.graph.nodes if node.op == "call_function" and "onnx_attn" in str(node.target)] == [op]
    result = program.module()(**tensors)
    results = [result] if isinstance(result, Tensor) else list(result)
    for actual, expected in zip(results, run((op, arguments))[0], strict=True):
        assert_same_bits(name, actual, expected)


def test_decompositions_leave_the_in_place_ops_whole() -> None:
    """Their pure form copies the cache, so it is for the ONNX exporter alone (test_export_caches)."""
    program = torch.export.export(Decoder("cpu"), decoder_inputs("cpu"), strict=False).run_decompositions({})
    text = str(program.graph)
    assert "onnx_attn.attention_cached" in text and "onnx_attn.tensor_scatter" not in text
    eager = Decoder("cpu")
    arguments = decoder_inputs("cpu")
    for actual, expected in zip(program.module()(*arguments), eager(*arguments), strict=True):
        torch.testing.assert_close(actual, expected, atol=5e-6, rtol=5e-6)


@pytest.mark.slow
def test_aot_inductor(tmp_path: Path, device: str) -> None:
    program = torch.export.export(Decoder(device), decoder_inputs(device), strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "decoder.pt2"))
        loaded = torch._inductor.aoti_load_package(package)
    eager = Decoder(device)
    arguments = decoder_inputs(device)
    for _ in range(2):  # the second call finds what the first one left in the caches
        for actual, expected in zip(loaded(*arguments), eager(*arguments), strict=True):
            torch.testing.assert_close(actual, expected, atol=5e-6, rtol=5e-6)
