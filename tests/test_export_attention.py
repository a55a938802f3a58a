"""attention exports to one ai.onnx::Attention node that says what was meant, and the node computes what the op computes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from cases import Case, call_attention, make_inputs
from export_support import ORT_IS_CURRENT, attributes, export, in_order, needs_current_ort
from torch import Tensor

INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
OUTPUTS = ("Y", "present_key", "present_value", "qk_matmul_output")
BOTH, ORT, REFERENCE = ("ort", "reference"), ("ort",), ("reference",)


@dataclasses.dataclass(frozen=True)
class Node:
    """A call, and the node it must become: lowest opset, attributes, and where the node can be run to compare."""

    case: Case
    opset: int = 23
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    runs_on: tuple[str, ...] = BOTH  # ORT where onnx.reference is wrong, REFERENCE where ONNX Runtime's kernel refuses or deviates


HEADS = {"q_num_heads": 4, "kv_num_heads": 2}
NODES = {
    "plain": Node(Case()),
    "multi_query": Node(Case(kv_heads=1)),
    "causal": Node(Case(is_causal=True), attributes={"is_causal": 1}),
    "scale": Node(Case(scale=0.25), attributes={"scale": 0.25}),
    "scale_zero": Node(Case(scale=0.0), attributes={"scale": 0.0}, runs_on=REFERENCE),
    "softcap": Node(Case(softcap=2.0), attributes={"softcap": 2.0}),
    "softmax_precision_float": Node(Case(softmax_precision=1), attributes={"softmax_precision": 1}),
    "softmax_precision_double": Node(Case(softmax_precision=11), attributes={"softmax_precision": 11}),
    "v_head_size": Node(Case(v_head_size=24)),
    "v_dtype": Node(Case(v_dtype=torch.float16), runs_on=REFERENCE),
    "batch_major_rows": Node(Case(layout="bshd")),
    "three_axes": Node(Case(layout="3d"), attributes=HEADS),
    "three_axes_causal_v_head_size": Node(Case(layout="3d", is_causal=True, v_head_size=8), attributes={"is_causal": 1, **HEADS}),
    # masks: any right-aligned shape is written as it is; ONNX Runtime's native kernel takes some of them
    "mask_bool_qk": Node(Case(mask="bool", mask_axes="qk")),
    "mask_bool_hqk": Node(Case(mask="bool", mask_axes="hqk")),
    "mask_bool_b1qk": Node(Case(mask="bool", mask_axes="b1qk")),
    "mask_bool_bhqk": Node(Case(mask="bool")),
    "mask_bool_b11k": Node(Case(mask="bool", mask_axes="b11k"), runs_on=REFERENCE),
    "mask_bool_k": Node(Case(mask="bool", mask_axes="k"), runs_on=REFERENCE),
    "mask_float": Node(Case(mask="same")),
    "mask_half_on_float": Node(Case(mask="float16"), runs_on=REFERENCE),
    "mask_int": Node(Case(mask="int32"), runs_on=REFERENCE),
    "mask_causal_softcap": Node(Case(mask="same", is_causal=True, softcap=3.0), attributes={"is_causal": 1, "softcap": 3.0}),
    # past and present
    "past": Node(Case(past=3)),
    "past_of_length_0": Node(Case(past=0)),
    "past_causal_mask": Node(Case(past=3, is_causal=True, mask="bool", mask_axes="qk"), attributes={"is_causal": 1}),
    "past_three_axes": Node(Case(past=3, layout="3d"), attributes=HEADS),
    "past_v_head_size": Node(Case(past=3, v_head_size=8)),
    # lengths
    "lengths": Node(Case(lengths="ragged"), 24),
    "lengths_causal": Node(Case(lengths="ragged", is_causal=True), 24, {"is_causal": 1}),
    "lengths_mask_softcap": Node(Case(lengths="ragged", mask="bool", mask_axes="b1qk", softcap=2.0), 24, {"softcap": 2.0}),
    "lengths_three_axes": Node(Case(lengths="ragged", layout="3d"), 24, HEADS),
    "lengths_short_mask": Node(Case(lengths="ragged", mask="bool", mask_axes="qk", mask_columns=6), 24, runs_on=REFERENCE),
    # windows
    "window_left": Node(Case(left_window_size=2), 25, {"left_window_size": 2}),
    "window_0": Node(Case(left_window_size=0, right_window_size=0), 25, {"left_window_size": 0, "right_window_size": 0}),
    "window_both_past": Node(Case(left_window_size=3, right_window_size=1, past=4), 25, {"left_window_size": 3, "right_window_size": 1}),
    "window_causal_lengths": Node(
        Case(left_window_size=3, is_causal=True, lengths="ragged", softcap=2.0), 25, {"left_window_size": 3, "is_causal": 1, "softcap": 2.0}
    ),
    # scores. Mode 2 shows -inf, where ONNX Runtime's kernel writes a finite number; onnx.reference caps mode 0
    "scores_0": Node(Case(qk_matmul_output_mode=0)),
    "scores_0_softcap": Node(Case(qk_matmul_output_mode=0, softcap=2.0), attributes={"softcap": 2.0}, runs_on=ORT),
    "scores_1_softcap": Node(Case(qk_matmul_output_mode=1, softcap=2.0), attributes={"softcap": 2.0, "qk_matmul_output_mode": 1}),
    "scores_2_mask": Node(Case(qk_matmul_output_mode=2, mask="bool"), attributes={"qk_matmul_output_mode": 2}, runs_on=REFERENCE),
    "scores_3": Node(Case(qk_matmul_output_mode=3, is_causal=True), attributes={"qk_matmul_output_mode": 3, "is_causal": 1}),
    "scores_3_lengths": Node(Case(qk_matmul_output_mode=3, lengths="ragged"), 24, {"qk_matmul_output_mode": 3}),
    "scores_3_past": Node(Case(qk_matmul_output_mode=3, past=2), attributes={"qk_matmul_output_mode": 3}),
    # types
    "float16": Node(Case(dtype=torch.float16, mask="bool", past=2)),
    "bfloat16": Node(Case(dtype=torch.bfloat16, is_causal=True), attributes={"is_causal": 1}, runs_on=REFERENCE),
    "float64": Node(Case(dtype=torch.float64, is_causal=True), attributes={"is_causal": 1}),
}


def inputs_of(case: Case) -> dict[str, Tensor]:
    """In ONNX order. Keys past the lengths are numbers here: both places multiply them by zero, which NaN survives."""
    inputs = make_inputs(case)
    return {name: inputs[name].nan_to_num(1.0, 1.0, 1.0) if name in "KV" else inputs[name] for name in INPUTS if name in inputs}


@pytest.mark.parametrize("name", NODES)
def test_one_node(name: str) -> None:
    node = NODES[name]
    case = node.case

    def call(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return call_attention(inputs, case.qk_matmul_output_mode, **case.attributes())

    exported = export(call, inputs_of(case))
    assert exported.types == ["Attention"]
    assert exported.opset == node.opset
    assert [(entry.domain, entry.version) for entry in exported.proto.opset_import] == [("", node.opset)]
    written = exported.node("Attention")
    assert list(written.input) == in_order(exported.inputs, INPUTS)
    assert list(written.output) == in_order(exported.eager, OUTPUTS)
    assert attributes(written) == node.attributes
    for where in node.runs_on:
        if where == "reference" or node.opset < 25 or ORT_IS_CURRENT:
            exported.agrees(where)


@needs_current_ort
@pytest.mark.parametrize("axes", ["b11k", "k"])
def test_any_mask_shape_runs_at_opset_25(axes: str) -> None:
    case = Case(mask="bool", mask_axes=axes)
    export(call_attention, inputs_of(case), opset=25).agrees("ort")


@pytest.mark.parametrize("opset", [23, 24, 25])
@pytest.mark.parametrize("mode", [None, 3])
def test_past_keeps_its_presents_when_nobody_reads_them(opset: int, mode: int | None) -> None:
    """ONNX Runtime refuses a past without presents."""

    def call(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        outputs = call_attention(inputs, mode)
        return {name: outputs[name] for name in ("Y", "qk_matmul_output") if name in outputs}

    exported = export(call, inputs_of(Case(past=3)), opset=opset)
    written = exported.node("Attention")
    assert len(written.output) == (3 if mode is None else 4) and all(written.output)
    exported.agrees("ort")


@pytest.mark.parametrize("opset", [23, 24, 25])
def test_scores_that_nobody_reads_are_not_written(opset: int) -> None:
    exported = export(lambda inputs: {"Y": call_attention(inputs, 3)["Y"]}, inputs_of(Case()), opset=opset)
    assert list(exported.node("Attention").output) == ["Y"]


@pytest.mark.parametrize("opset", [24, 25])
def test_lengths_with_scores_have_no_present_outputs(opset: int) -> None:
    """ONNX forbids present outputs beside nonpad_kv_seqlen."""
    exported = export(lambda inputs: call_attention(inputs, 3), inputs_of(Case(lengths="ragged")), opset=opset)
    assert list(exported.node("Attention").output) == ["Y", "", "", "qk_matmul_output"]
    exported.agrees("ort")


def test_dead_rows_are_zero_without_guards() -> None:
    """A row without an allowed key is zero by the node's own meaning: no Where, no IsNaN around it."""
    exported = export(call_attention, inputs_of(Case(mask="bool", mask_axes="qk")))
    assert exported.types == ["Attention"]
    assert (exported.eager["Y"][:, :, 1] == 0).all()
    exported.agrees("ort")


@pytest.mark.parametrize(("name", "value"), [("scale", 1e-60), ("softcap", 1e300)])
def test_a_number_beyond_float32_is_refused(name: str, value: float) -> None:
    import torch_onnx_attn.onnx

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.onnx_attn.attention.default(x, x, x, **{name: value})

    with pytest.raises(Exception, match=f"{name}=.* does not fit ONNX's float attributes"):
        torch_onnx_attn.onnx.export(Model().eval(), (torch.randn(1, 1, 2, 8, dtype=torch.float64),))
