"""One export serves other sizes: no Shape, Slice or Reshape around the node, down to batch 1, one row and an empty past."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import Case, call_attention
from export_support import export, needs_current_ort
from test_export_attention import inputs_of
from torch import Tensor, nn

import torch_onnx_attn
import torch_onnx_attn.onnx

ROWS_4D = {"Q": {0: "batch", 2: "q_len"}, "K": {0: "batch", 2: "kv_len"}, "V": {0: "batch", 2: "kv_len"}}
ROWS_3D = {"Q": {0: "batch", 1: "q_len"}, "K": {0: "batch", 1: "kv_len"}, "V": {0: "batch", 1: "kv_len"}}
PAST = {name: {0: "batch", 2: "past_len"} for name in ("past_key", "past_value")}
SIZES = [{"batch": 1, "q_len": 1, "kv_len": 1}, {"batch": 3, "q_len": 2, "kv_len": 17}, {"batch": 1, "q_len": 9, "kv_len": 4}]


@pytest.mark.parametrize(
    ("case", "dynamic", "sizes"),
    [
        pytest.param(Case(is_causal=True), ROWS_4D, SIZES, id="four_axes"),
        pytest.param(Case(layout="3d", is_causal=True), ROWS_3D, SIZES, id="three_axes"),
        pytest.param(Case(mask="bool", mask_axes="b1qk"), ROWS_4D | {"attn_mask": {0: "batch", 2: "q_len", 3: "kv_len"}}, SIZES, id="mask"),
        pytest.param(
            Case(layout="3d", past=3, mask="same", mask_axes="qk"),
            ROWS_3D | PAST | {"attn_mask": {0: "q_len", 1: "total"}},
            [size | {"past": past} for size, past in zip(SIZES, (0, 5, 1), strict=True)],
            id="three_axes_past_mask",
        ),
        pytest.param(
            Case(past=3, is_causal=True),
            ROWS_4D | PAST,
            [size | {"past": past} for size, past in zip(SIZES, (0, 5, 1), strict=True)],
            id="past",
        ),
        pytest.param(Case(lengths="ragged"), ROWS_4D | {"nonpad_kv_seqlen": {0: "batch"}}, SIZES, id="lengths"),
        pytest.param(Case(left_window_size=2, is_causal=True), ROWS_4D, SIZES, id="window", marks=needs_current_ort),
        pytest.param(Case(qk_matmul_output_mode=3, softcap=2.0), ROWS_4D, SIZES, id="scores"),
    ],
)
def test_other_sizes(case: Case, dynamic: dict[str, dict[int, str]], sizes: list[dict[str, int]]) -> None:
    def call(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return call_attention(inputs, case.qk_matmul_output_mode, **case.attributes())

    exported = export(call, inputs_of(case), dynamic=dynamic)
    assert exported.types == ["Attention"]
    exported.agrees("ort")
    for size in sizes:
        exported.agrees("ort", inputs_of(dataclasses.replace(case, **size)))


def test_an_example_of_ones_stays_dynamic() -> None:
    """Sizes 0 and 1 in the example do not become constants."""
    case = Case(batch=1, q_len=1, kv_len=1, past=0)
    exported = export(call_attention, inputs_of(case), dynamic=ROWS_4D | PAST)
    assert exported.types == ["Attention"]
    exported.agrees("ort", inputs_of(Case(batch=2, q_len=4, kv_len=4, past=3)))


def test_present_sizes_are_sums() -> None:
    exported = export(call_attention, inputs_of(Case(past=3)), dynamic=ROWS_4D | PAST)
    shape = exported.proto.graph.output[1].type.tensor_type.shape.dim
    assert [dim.dim_param or dim.dim_value for dim in shape[:2]] == ["batch", 2]
    assert {part.strip() for part in shape[2].dim_param.split("+")} == {"kv_len", "past_len"}


def test_a_layer_with_projections_has_no_reshapes() -> None:
    """With three axes the projections feed the node as they are."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.kv, self.out = nn.Linear(32, 32, bias=False), nn.Linear(32, 16, bias=False), nn.Linear(32, 32, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            k = self.kv(x)
            return self.out(torch_onnx_attn.attention(self.q(x), k, k, is_causal=True, q_num_heads=4, kv_num_heads=2).Y)

    program = torch_onnx_attn.onnx.export(Layer().eval(), (torch.randn(2, 5, 32),), dynamic_shapes=({0: "batch", 1: "rows"},))
    assert sorted(node.op_type for node in program.model_proto.graph.node) == ["Attention", "MatMul", "MatMul", "MatMul"]


def test_axes_of_a_view_are_read_from_the_graph() -> None:
    """The usual split of heads in a model: its reshapes stay, the attention is one node, and other sizes run."""

    def call(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        q = inputs["x"].unflatten(2, (4, 8)).transpose(1, 2)
        y = torch_onnx_attn.attention(q, q, q).Y
        return {"y": y.transpose(1, 2).flatten(2)}

    exported = export(call, {"x": torch.randn(2, 5, 32)}, dynamic={"x": {0: "batch", 1: "rows"}})
    assert exported.types.count("Attention") == 1 and "Softmax" not in exported.types
    for shape in ((1, 1, 32), (3, 7, 32)):
        exported.agrees("ort", {"x": torch.randn(shape)})
