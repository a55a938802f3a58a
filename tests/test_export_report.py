"""The report on an exported file, and the helpers that write dynamic_shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case, call_attention
from export_support import Call, onnx
from test_export_attention import inputs_of
from torch import Tensor, nn

import torch_onnx_attn.onnx
from torch_onnx_attn.onnx import axes, differing_axes, report

OPS = torch.ops.onnx_attn


def exported(case: Case, path: Path | None = None, dynamic: dict[str, dict[int, str]] | None = None, **options: Any) -> Any:
    def call(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return call_attention(inputs, case.qk_matmul_output_mode, **case.attributes())

    inputs = inputs_of(case)
    shapes = None if dynamic is None else {"tensors": tuple(dynamic.get(name) for name in inputs)}
    return torch_onnx_attn.onnx.export(
        Call(list(inputs), call).eval(), tuple(inputs.values()), path, input_names=list(inputs), dynamic_shapes=shapes, **options
    )


# ------------------------------------------------------------------------------------------------------------------ report


def test_what_it_says_of_a_node() -> None:
    case = Case(is_causal=True, lengths="ragged", mask="bool", mask_axes="b1qk", softcap=2.0)
    found = report(
        exported(case, dynamic={"Q": {0: "batch", 2: "rows"}, "K": {0: "batch"}, "V": {0: "batch"}, "nonpad_kv_seqlen": {0: "b"}})
    )
    (node,) = found.nodes
    assert (node.op, node.outputs, node.attributes) == ("Attention", ("Y",), {"is_causal": 1, "softcap": 2.0})
    assert list(node.inputs) == ["Q", "K", "V", "attn_mask", "nonpad_kv_seqlen"]
    assert node.inputs["Q"] == found.inputs["Q"] == f"float32 [batch, {case.q_heads}, rows, {case.head_size}]"
    assert node.inputs["nonpad_kv_seqlen"].startswith("int64 [") and node.inputs["attn_mask"].startswith("bool [")
    assert node.needs == (24, "nonpad_kv_seqlen") and found.opset == 24
    assert not found.other_nodes and found.weight_bytes == 0


@pytest.mark.parametrize(
    ("case", "opset", "why"),
    [
        pytest.param(Case(), None, "opset 23, 23 is the lowest that has Attention", id="plain"),
        pytest.param(Case(), 25, "opset 25, more than needed, 23 is the lowest that has Attention", id="asked_for"),
        pytest.param(Case(lengths="ragged"), None, "opset 24, 24 is the lowest that has nonpad_kv_seqlen", id="lengths"),
        pytest.param(Case(left_window_size=2), 28, "opset 28, more than needed, 25 is the lowest that has left_window_size", id="window"),
    ],
)
def test_why_this_opset(case: Case, opset: int | None, why: str) -> None:
    assert str(report(exported(case, opset=opset))).splitlines()[0] == why


@pytest.mark.parametrize(
    ("case", "opset", "remark"),
    [
        pytest.param(Case(dtype=torch.bfloat16), 23, "no bfloat16 kernel", id="bfloat16"),
        pytest.param(Case(), 25, "expanded function", id="expanded"),
        pytest.param(Case(lengths="ragged"), 24, "must not hold NaN", id="lengths"),
        pytest.param(Case(mask="bool", mask_axes="b11k"), 23, "refuse a mask of one row", id="mask_of_one_row"),
        pytest.param(Case(qk_matmul_output_mode=2, mask="bool"), 23, "finite number for -inf", id="mode_2"),
        pytest.param(Case(qk_matmul_output_mode=0, softcap=2.0), 23, "onnx.reference caps score mode 0", id="mode_0"),
        pytest.param(Case(scale=0.0), 23, "refuse scale <= 0", id="scale"),
    ],
)
def test_what_runtimes_make_of_it(case: Case, opset: int, remark: str) -> None:
    found = report(exported(case, opset=opset))
    assert [remark in text for text in found.remarks] == [True]
    assert f"(1 of {len(found.nodes)} nodes)" in str(found)


def test_nothing_is_remarked_on_a_plain_node() -> None:
    assert report(exported(Case(mask="bool", past=2, is_causal=True))).remarks == {}


def test_nodes_in_branches_and_other_nodes_are_listed() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8, bias=False).half()

        def forward(self, q: Tensor, flag: Tensor) -> Tensor:
            def causal(x: Tensor) -> Tensor:
                return OPS.attention.default(x, x, x, is_causal=True)

            def full(x: Tensor) -> Tensor:
                return OPS.attention.default(x, x, x)

            y = torch.cond(flag, causal, full, (q,))
            flat = self.linear(y).transpose(1, 2).flatten(2)
            return OPS.mha.default(flat, flat, flat, num_heads=2)

    found = report(torch_onnx_attn.onnx.export(Model().eval(), (torch.randn(1, 2, 4, 8).half(), torch.tensor(True)), opset=24))
    assert sorted(node.op for node in found.nodes) == ["Attention", "Attention", "MultiHeadAttention"]
    assert found.other_nodes["If"] == 1 and found.other_nodes["MatMul"] == 1
    assert found.weight_bytes >= 128
    mha = next(node for node in found.nodes if node.op == "MultiHeadAttention")
    assert mha.needs is None and mha.attributes == {"num_heads": 2} and list(mha.inputs) == ["query", "key", "value"]
    assert all(kind.startswith("float16 ") for kind in mha.inputs.values())


def test_of_a_file(tmp_path: Path) -> None:
    layer = nn.Linear(8, 64, bias=False)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return OPS.attention.default(y, y, y, q_num_heads=4, kv_num_heads=4)

    program = torch_onnx_attn.onnx.export(Model().eval(), (torch.randn(1, 3, 8),), tmp_path / "model.onnx")
    found = report(tmp_path / "model.onnx")
    assert found.nodes == report(program).nodes
    assert (found.weight_bytes, found.weight_files) == (8 * 64 * 4, ("model.onnx.data",))
    assert "weights: 2.0 KiB, in model.onnx.data" in str(found)


def test_a_model_without_attention() -> None:
    program = torch_onnx_attn.onnx.export(nn.Linear(2, 2).eval(), (torch.randn(1, 2),))
    assert "no attention or cache nodes" in str(report(program)) and "which no attention node asks for" in str(report(program))


def test_equal_nodes_share_a_line() -> None:
    def call(t: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"y": OPS.attention.default(t["x"], t["x"], t["x"]), "z": OPS.attention.default(t["x"], t["x"], t["x"] + 1)}

    program = torch_onnx_attn.onnx.export(Call(["x"], call).eval(), (torch.randn(1, 2, 3, 8),))
    assert "  2 x Attention(" in str(report(program))


# --------------------------------------------------------------------------------------------------------- dynamic shapes


def test_axes_from_text() -> None:
    assert axes(Q="batch _ rows 64", lengths="batch", scale="") == {"Q": {0: "batch", 2: "rows"}, "lengths": {0: "batch"}, "scale": {}}
    with pytest.raises(ValueError, match=r"Q: '1x' in 'batch 1x' is neither a name, nor a number, nor _"):
        axes(Q="batch 1x")


class Lengths(nn.Module):
    def forward(self, q: Tensor, kv: tuple[Tensor, Tensor], lengths: Tensor) -> Tensor:
        return OPS.attention.default(q, *kv, nonpad_kv_seqlen=lengths)


def lengths_inputs(batch: int, rows: int, keys: int) -> tuple[Any, ...]:
    kv = (torch.randn(batch, 2, keys, 8), torch.randn(batch, 2, keys, 8))
    return torch.randn(batch, 4, rows, 8), kv, torch.randint(1, keys + 1, (batch,))


def test_axes_that_differ_in_two_examples() -> None:
    one, two = lengths_inputs(2, 4, 6), lengths_inputs(3, 5, 9)
    shapes = differing_axes(one, two, {(2, 3): "batch", (4, 5): "rows"})
    cache = {0: "batch", 2: "size_2"}
    assert shapes == ({0: "batch", 2: "rows"}, (cache, cache), {0: "batch"})
    assert differing_axes(one, one) == (None, (None, None), None)
    proto = torch_onnx_attn.onnx.export(Lengths().eval(), one, dynamic_shapes=shapes).model_proto
    sizes = [[dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in proto.graph.input]
    assert sizes == [["batch", 4, "rows", 8], ["batch", 2, "size_2", 8], ["batch", 2, "size_2", 8], ["batch"]]


def test_examples_that_differ_in_more_than_sizes() -> None:
    one = lengths_inputs(2, 4, 6)
    with pytest.raises(ValueError, match="nested in another way"):
        differing_axes(one, (one[0], list(one[1]), one[2]))
    with pytest.raises(ValueError, match="tensor 0 has another number of axes"):
        differing_axes(one, (one[0][0], *one[1:]))


def test_axes_from_text_export() -> None:
    class Model(nn.Module):
        def forward(self, Q: Tensor, K: Tensor) -> Tensor:
            return OPS.attention.default(Q, K, K)

    inputs = (torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8))
    shapes = axes(Q="batch _ rows _", K="batch _ keys _")
    proto = torch_onnx_attn.onnx.export(Model().eval(), inputs, dynamic_shapes=shapes).model_proto
    onnx.checker.check_model(proto, full_check=True)
    assert [dim.dim_param or dim.dim_value for dim in proto.graph.output[0].type.tensor_type.shape.dim] == ["batch", 4, "rows", 8]


@pytest.mark.parametrize("content", [b"", b"no model at all", b"\x08"], ids=["empty", "text", "cut_off"])
def test_a_file_that_is_no_model(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.onnx: is no ONNX model"):
        report(path)
    with pytest.raises(TypeError, match="model: is of type int"):
        report(5)
