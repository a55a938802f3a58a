"""mha exports to one com.microsoft::MultiHeadAttention node, with a Cast where the operator wants int32."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from cases import MhaCase, call_mha, make_mha_inputs
from export_support import ORT_IS_CURRENT, Exported, attributes, export, in_order, onnx, run
from torch import Tensor

INPUTS = (
    "query",
    "key",
    "value",
    "bias",
    "key_padding_mask",
    "attention_bias",
    "past_key",
    "past_value",
    "past_sequence_length",
    "cache_indirection",
)
OUTPUTS = ("output", "present_key", "present_value", "qk")


@dataclasses.dataclass(frozen=True)
class Node:
    """A call, and the node it must become. ONNX Runtime on the CPU has no packed layouts."""

    case: MhaCase
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    casts: tuple[str, ...] = ()  # node types before the node
    runs: bool = True


NODES = {
    "plain": Node(MhaCase()),
    "bias": Node(MhaCase(bias=True)),
    "v_head_size": Node(MhaCase(v_head_size=8, bias=True)),
    "scale": Node(MhaCase(scale=0.5), {"scale": 0.5}),
    "negative_scale": Node(MhaCase(scale=-0.5), {"scale": -0.5}),
    "unidirectional": Node(MhaCase(q_len=6, kv_len=6, unidirectional=True), {"unidirectional": 1}),
    "split_heads": Node(MhaCase(layout="bnsh")),
    "packed_kv": Node(MhaCase(layout="packed_kv"), runs=False),
    "packed_qkv": Node(MhaCase(layout="packed_qkv", q_len=5, kv_len=5), runs=False),
    "attention_bias": Node(MhaCase(attention_bias="bh")),
    "attention_bias_broadcast": Node(MhaCase(attention_bias="", mask="keys")),
    # masks of the type the operator takes
    "mask_keys": Node(MhaCase(mask="keys")),
    "mask_rows": Node(MhaCase(mask="rows", bias=True)),
    "mask_lengths": Node(MhaCase(mask="lengths")),
    "mask_lengths_starts": Node(MhaCase(mask="lengths_starts")),
    "mask_filter_value": Node(MhaCase(mask="keys", mask_filter_value=-2.0), {"mask_filter_value": -2.0}),
    # masks of other types
    "mask_keys_bool": Node(MhaCase(mask="keys", mask_dtype=torch.bool), casts=("Cast",)),
    "mask_rows_bool": Node(MhaCase(mask="rows", mask_dtype=torch.bool), casts=("Cast",)),
    "mask_keys_int64": Node(MhaCase(mask="keys", mask_dtype=torch.int64), casts=("Greater", "Cast")),
    "mask_rows_int64": Node(MhaCase(mask="rows", mask_dtype=torch.int64), casts=("Greater", "Cast")),
    "mask_lengths_int64": Node(MhaCase(mask="lengths", mask_dtype=torch.int64), casts=("Clip", "Cast")),
    # past and present
    "past": Node(MhaCase(past=3)),
    "past_of_length_0": Node(MhaCase(past=0)),
    "past_mask_bias": Node(MhaCase(past=3, mask="keys", bias=True)),
    "past_unidirectional": Node(MhaCase(past=3, q_len=4, kv_len=4, unidirectional=True), {"unidirectional": 1}),
    # scores
    "qk": Node(MhaCase(qk=True, mask="keys")),
    "qk_past": Node(MhaCase(qk=True, past=2, attention_bias="h")),
    # shared buffers
    "shared": Node(MhaCase(past=3, capacity=16)),
    "shared_empty": Node(MhaCase(past=0, capacity=16, bias=True)),
    "shared_mask": Node(MhaCase(past=3, capacity=16, q_len=1, kv_len=1, mask="keys")),
    "shared_beams": Node(MhaCase(batch=4, past=3, capacity=16, q_len=1, kv_len=1, beams=2)),
    # types
    "float16": Node(MhaCase(dtype=torch.float16, mask="keys", bias=True)),
    "bfloat16": Node(MhaCase(dtype=torch.bfloat16), runs=False),
}


def inputs_of(case: MhaCase) -> dict[str, Tensor]:
    """In ONNX order. Rows of shared buffers that are not in use are numbers, so that they can be compared.

    Every row keeps its first key. With none kept, all scores sit at mask_filter_value, where float32 is 1e-3 coarse.
    """
    inputs = make_mha_inputs(case)
    if case.mask is not None:
        mask = inputs["key_padding_mask"]
        kept = mask[: case.batch] if mask.dim() == 1 else mask[..., 0]
        kept.copy_(kept.clamp(min=1) if mask.dtype != torch.bool else True)
    return {name: inputs[name].nan_to_num(1.0, 1.0, 1.0) if "past_" in name else inputs[name] for name in INPUTS if name in inputs}


def export_mha(case: MhaCase, **options: Any) -> Exported:
    return export(lambda inputs: call_mha(inputs, case.qk, **case.attributes()), inputs_of(case), **options)


@pytest.mark.parametrize("name", NODES)
def test_one_node(name: str) -> None:
    node = NODES[name]
    exported = export_mha(node.case)
    assert exported.types == [*node.casts, "MultiHeadAttention"]
    written = exported.node("MultiHeadAttention")
    assert written.domain == "com.microsoft"
    assert {entry.domain: entry.version for entry in exported.proto.opset_import}["com.microsoft"] == 1
    want = in_order(exported.inputs, INPUTS)
    if node.casts:
        want[want.index("key_padding_mask")] = next(n for n in exported.nodes if n.op_type == "Cast").output[0]
        cast_from = exported.nodes[0].input[0]
        assert cast_from == "key_padding_mask"
    assert list(written.input) == want
    assert list(written.output) == in_order(exported.eager, OUTPUTS)
    assert attributes(written) == {"num_heads": node.case.num_heads, **node.attributes}
    shares = node.case.capacity is not None and node.case.beams is None
    if node.runs and (ORT_IS_CURRENT or not shares):
        exported.agrees("ort")


def test_an_int64_mask_keeps_what_is_above_zero_whatever_its_size() -> None:
    case = MhaCase(batch=1, kv_len=4)
    inputs = inputs_of(case) | {"key_padding_mask": torch.tensor([[2**40, 0, 1, -(2**40) + 1]])}
    exported = export(lambda tensors: call_mha(tensors, **case.attributes()), inputs)
    exported.agrees("ort")
    plain = inputs | {"key_padding_mask": torch.tensor([[1, 0, 1, 0]])}
    assert torch.equal(exported.eager["output"], call_mha(plain, **case.attributes())["output"])


def test_a_row_without_keys_is_a_softmax_of_coarse_scores() -> None:
    """mask_filter_value is added to every score alike, and cancels."""
    inputs = inputs_of(MhaCase(mask="keys"))
    inputs["key_padding_mask"].zero_()
    exported = export(lambda tensors: call_mha(tensors, num_heads=2), inputs)
    exported.agrees("ort", tolerance=3e-3)


def test_an_int64_past_sequence_length_is_cast() -> None:
    case = MhaCase(past=3, capacity=16)
    inputs = inputs_of(case)
    inputs["past_sequence_length"] = inputs["past_sequence_length"].long()
    exported = export(lambda tensors: call_mha(tensors, **case.attributes()), inputs)
    assert exported.types == ["Cast", "MultiHeadAttention"]
    assert attributes(exported.node("Cast")) == {"to": onnx.TensorProto.INT32}
    if ORT_IS_CURRENT:
        exported.agrees("ort")


def test_shared_buffers_come_out_as_presents() -> None:
    """The exporter sees mha.shared as a pure op followed by two writes."""
    exported = export_mha(MhaCase(past=3, capacity=16))
    assert list(exported.node("MultiHeadAttention").output) == ["output", "present_key", "present_value"]
    assert exported.eager["present_key"].shape[2] == 16


def test_presents_stay_when_nobody_reads_them() -> None:
    """ONNX Runtime's kernel gives wrong numbers for a past without presents."""
    case = MhaCase(past=3)
    exported = export(lambda inputs: {"output": call_mha(inputs, **case.attributes())["output"]}, inputs_of(case))
    assert len(exported.node("MultiHeadAttention").output) == 3
    exported.agrees("ort")


def test_scores_that_nobody_reads_are_not_written() -> None:
    exported = export(lambda inputs: {"output": call_mha(inputs, True, num_heads=2)["output"]}, inputs_of(MhaCase()))
    assert list(exported.node("MultiHeadAttention").output) == ["output"]


@pytest.mark.parametrize("opset", [20, 23, 25, 28])
def test_the_opset_of_ai_onnx_is_free(opset: int) -> None:
    exported = export_mha(MhaCase(mask="keys", mask_dtype=torch.bool), opset=opset)
    assert exported.opset == opset
    if opset <= 26 or ORT_IS_CURRENT:
        exported.agrees("ort")


def test_float64_is_refused() -> None:
    case = MhaCase()
    inputs = {name: tensor.double() for name, tensor in inputs_of(case).items()}
    with pytest.raises(Exception, match="float64"):
        export(lambda tensors: call_mha(tensors, **case.attributes()), inputs)


def test_batch_and_lengths_are_free() -> None:
    case = MhaCase(mask="keys", bias=True)
    dynamic = {"query": {0: "batch", 1: "q_len"}, "key": {0: "batch", 1: "kv_len"}, "value": {0: "batch", 1: "kv_len"}}
    dynamic["key_padding_mask"] = {0: "batch", 1: "kv_len"}
    exported = export_mha(case, dynamic=dynamic)
    assert exported.types == ["MultiHeadAttention"]
    for batch, q_len, kv_len in ((1, 1, 1), (3, 2, 17), (1, 8, 3)):
        exported.agrees("ort", inputs_of(dataclasses.replace(case, batch=batch, q_len=q_len, kv_len=kv_len)))


def test_past_is_free_down_to_length_0() -> None:
    case = MhaCase(past=3, mask="keys")
    dynamic = {name: {0: "batch", 1: "new_len"} for name in ("query", "key", "value")}
    dynamic |= {name: {0: "batch", 2: "past_len"} for name in ("past_key", "past_value")}
    dynamic["key_padding_mask"] = {0: "batch", 1: "kv_len"}
    exported = export_mha(dataclasses.replace(case, q_len=5, kv_len=5), dynamic=dynamic)
    assert exported.types == ["MultiHeadAttention"]
    for batch, new_len, past in ((1, 4, 0), (2, 1, 7), (1, 1, 0)):
        exported.agrees("ort", inputs_of(dataclasses.replace(case, batch=batch, q_len=new_len, kv_len=new_len, past=past)))


def test_the_mask_of_a_model_is_cast_once() -> None:
    """Six layers share one Cast: the exporter's optimizer merges equal nodes."""

    def layers(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        x = inputs["x"]
        for _ in range(6):
            x = torch.ops.onnx_attn.mha.default(x, x, x, None, inputs["keep"], num_heads=2)
        return {"y": x}

    exported = export(layers, {"x": torch.randn(2, 5, 32), "keep": torch.ones(2, 5, dtype=torch.bool)})
    assert sorted(exported.types) == ["Cast"] + 6 * ["MultiHeadAttention"]
    torch.testing.assert_close(run(exported.proto, exported.inputs, "ort")[0], exported.eager["y"], rtol=1e-5, atol=1e-5)
