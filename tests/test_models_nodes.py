"""Attention nodes are found and run wherever they are, and one of them can be called from PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from model_files import Source, model_of, model_of_node, node_of, node_proto, onnx, save

from torch_onnx_attn import reference
from torch_onnx_attn.models import BadInput, find_nodes, inspect, load_node, open_model, verify
from torch_onnx_attn.models.arrays import to_array, to_tensor
from torch_onnx_attn.models.node_call import call_of

FLOAT, INT64, BOOL = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64, onnx.TensorProto.BOOL


def info(name: str, element: int, shape: list[Any] | None = None) -> Any:
    return onnx.helper.make_tensor_value_info(name, element, shape)


def model_with_branches() -> tuple[Any, dict[str, Any]]:
    """A node in each branch of an If, and one before it."""
    arrays = Source().qkv()
    branches = {}
    for branch, causal in (("then_branch", 1), ("else_branch", 0)):
        node = onnx.helper.make_node("Attention", ["Y", "K", "V"], [f"{branch}_Y"], name=f"in_{branch}", is_causal=causal)
        branches[branch] = onnx.helper.make_graph([node], branch, [], [info(f"{branch}_Y", FLOAT)])
    first = node_proto("attention", arrays, ["Y"], name="first")
    choice = onnx.helper.make_node("If", ["flag"], ["Z"], name="choice", **branches)
    inputs = arrays | {"flag": np.array(True)}
    return model_of([first, choice], inputs, [info("Z", FLOAT)]), inputs


def model_with_loop(steps: int) -> tuple[Any, dict[str, Any]]:
    """A node that attends `steps` times to its own output."""
    arrays = Source().qkv()
    attend = onnx.helper.make_node("Attention", ["state", "K", "V"], ["next"], name="attend")
    going_on = onnx.helper.make_node("Identity", ["condition"], ["going_on"])
    body = onnx.helper.make_graph(
        [attend, going_on],
        "body",
        [info("step", INT64, []), info("condition", BOOL, []), info("state", FLOAT, list(arrays["Q"].shape))],
        [info("going_on", BOOL, []), info("next", FLOAT, list(arrays["Q"].shape))],
    )
    loop = onnx.helper.make_node("Loop", ["count", "", "Q"], ["Y"], name="loop", body=body)
    inputs = arrays | {"count": np.array(steps)}
    return model_of([loop], inputs, [info("Y", FLOAT)]), inputs


def model_with_function() -> tuple[Any, dict[str, Any]]:
    """A function with an attention in it, called twice."""
    node = onnx.helper.make_node("Attention", ["q", "k", "v"], ["y"], name="inner", is_causal=1)
    function = onnx.helper.make_function("local", "Block", ["q", "k", "v"], ["y"], [node], [onnx.helper.make_opsetid("", 24)])
    calls = [onnx.helper.make_node("Block", [first, "K", "V"], [second], domain="local") for first, second in (("Q", "H"), ("H", "Y"))]
    arrays = Source().qkv()
    return model_of(calls, arrays, ["Y"], functions=[function]), arrays


def test_nodes_in_branches(tmp_path: Path) -> None:
    model, inputs = model_with_branches()
    path = save(model, tmp_path)
    nodes = {node.name: node for node in find_nodes(open_model(path))}
    assert set(nodes) == {"first", "in_then_branch", "in_else_branch"}
    assert nodes["first"].place == () and nodes["in_then_branch"].place == ("choice.then_branch",)
    result = verify(path, inputs)
    assert {node.node: node.status for node in result.nodes} == {
        "first": "agree",
        "in_then_branch": "agree",
        "in_else_branch": "not executed",
    }
    assert result.failures() == [] and [node.node for node in result.failures(strict=True)] == ["in_else_branch"]
    assert next(node.verdict for node in result.nodes if node.node == "in_else_branch").endswith("(in choice.else_branch)")
    (other,) = verify(path, inputs | {"flag": np.array(False)}, only=["in_else_branch"]).nodes
    assert other.status == "agree" and other.executions == 1


def test_nodes_in_branches_of_a_model_that_onnx_reference_cannot_run(tmp_path: Path) -> None:
    model, inputs = model_with_branches()
    fused = onnx.helper.make_node("FusedMatMul", ["Q", "Q"], ["other"], domain="com.microsoft", transB=1)
    model.graph.node.append(fused)
    result = verify(save(model, tmp_path), inputs)
    found = {node.node: node for node in result.nodes}
    assert found["first"].status == "agree" and found["in_then_branch"].status == "not executed"
    assert "onnx.reference, which cannot run the model" in found["in_then_branch"].verdict
    assert len(result.failures(strict=True)) == 2


def test_a_node_in_a_loop_is_checked_at_every_step(tmp_path: Path) -> None:
    model, inputs = model_with_loop(3)
    (node,) = verify(save(model, tmp_path), inputs).nodes
    assert node.status == "agree" and node.executions == 3


def test_nodes_in_functions_are_told_apart(tmp_path: Path) -> None:
    model, inputs = model_with_function()
    path = save(model, tmp_path)
    names = [node.name for node in find_nodes(open_model(path))]
    assert len(set(names)) == 2 and all(name.startswith("Block/inner") for name in names)
    assert [node.status for node in verify(path, inputs).nodes] == ["agree", "agree"]


def test_equal_names_and_no_names(tmp_path: Path) -> None:
    arrays = Source().qkv()
    nodes = [
        onnx.helper.make_node("Attention", ["Q", "K", "V"], [output], name=name) for output, name in (("a", "x"), ("b", "x"), ("c", ""))
    ]
    found = find_nodes(open_model(save(model_of(nodes, arrays, ["a", "b", "c"]), tmp_path)))
    assert [node.name for node in found] == ["x", "x#2", "c"]


def test_onnx_spelt_out_as_a_domain(tmp_path: Path) -> None:
    model = model_of_node("attention", Source().qkv())
    model.graph.node[0].domain = model.opset_import[0].domain = "ai.onnx"
    (node,) = find_nodes(open_model(save(model, tmp_path)))
    assert node.title == "ai.onnx::Attention-24"


# ---------------------------------------------------------------------------------------------------------------------
# load_node
# ---------------------------------------------------------------------------------------------------------------------


def test_a_node_is_a_function_of_tensors(tmp_path: Path) -> None:
    arrays = Source().qkv() | Source(1).past()
    model = model_of_node("attention", arrays, ["Y", "present_key", "present_value"], is_causal=1, scale=0.5, softcap=3.0)
    node = load_node(save(model, tmp_path), "layer")
    assert node.operator == "ai.onnx::Attention-24"
    assert node.inputs == ("Q", "K", "V", "past_key", "past_value") and node.outputs == ("Y", "present_key", "present_value")
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    expected = reference.attention(**tensors, is_causal=True, scale=0.5, softcap=3.0)
    for result in (node(*tensors.values()), node(*list(tensors.values())[:2], **dict(list(tensors.items())[2:]))):
        assert isinstance(result, tuple)
        for actual, wanted in zip(result, (expected.Y, expected.present_key, expected.present_value), strict=True):
            torch.testing.assert_close(actual.double(), wanted, atol=1e-6, rtol=1e-6)


def test_a_node_is_found_by_its_output_and_has_its_constants(tmp_path: Path) -> None:
    arrays = Source().qkv()
    mask = Source(2).keep(3, 5)
    node = onnx.helper.make_node("Attention", ["Q", "K", "K", "mask"], ["Z"], name="layer")
    model = model_of([node], {"Q": arrays["Q"], "K": arrays["K"]}, ["Z"], initializer=[onnx.numpy_helper.from_array(mask, "mask")])
    loaded = load_node(save(model, tmp_path), "Z")
    Q, K = (torch.from_numpy(arrays[name]) for name in ("Q", "K"))
    expected = reference.attention(Q, K, K, torch.from_numpy(mask)).Y
    result = loaded(Q, K, V=K)
    assert isinstance(result, torch.Tensor)
    torch.testing.assert_close(result.double(), expected, atol=1e-6, rtol=1e-6)


def test_what_a_loaded_node_refuses(tmp_path: Path) -> None:
    path = save(model_of_node("attention", Source().qkv()), tmp_path)
    with pytest.raises(BadInput, match="no attention node 'nothing'; there are layer"):
        load_node(path, "nothing")
    node = load_node(path, "layer")
    Q = torch.zeros(2, 4, 3, 8)
    with pytest.raises(TypeError, match="K: is missing; the node's inputs are Q, K, V"):
        node(Q)
    with pytest.raises(TypeError, match="attn_mask: is no input of the node"):
        node(Q, Q, Q, attn_mask=Q)
    with pytest.raises(TypeError, match="4 tensors were given"):
        node(Q, Q, Q, Q)
    with pytest.raises(RuntimeError, match="K: "):
        node(Q, Q[..., :7], Q)


@pytest.mark.parametrize("opset, presents", [(23, True), (24, True), (24, False)])
def test_presents_without_a_past_are_the_inputs(opset: int, presents: bool) -> None:
    """Also beside lengths, which the op itself does not combine with a past. 3-D inputs have their heads split."""
    arrays = {"Q": Source().normal(2, 3, 32), "K": Source(1).normal(2, 5, 16), "V": Source(2).normal(2, 5, 24)}
    if opset == 24:
        arrays["nonpad_kv_seqlen"] = np.array([2, 5])
    outputs = ["Y", "present_key", "present_value"] if presents else ["Y"]
    call = call_of(node_of("attention", arrays, outputs, opset, q_num_heads=4, kv_num_heads=2), arrays)
    made, wanted = call.run(), call.expected()
    assert list(made) == outputs
    for name in outputs[1:]:
        assert torch.equal(made[name].double(), wanted[name])


def test_optional_inputs_in_the_middle_may_be_missing() -> None:
    arrays = Source().mha() | {"attention_bias": Source(3).normal(1, 4, 3, 5)}
    node = node_of("mha", arrays, num_heads=4)
    assert list(node.proto.input) == ["query", "key", "value", "", "", "attention_bias"]
    assert list(node.inputs) == list(arrays)


@pytest.mark.parametrize(
    "dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.uint8, np.bool_, ml_dtypes.float8_e4m3fn]
)
def test_arrays_survive_the_way_to_torch_and_back(dtype: Any) -> None:
    for shape in ((2, 3), (), (0, 4)):
        array = (Source().normal(*shape) * 3).astype(dtype)
        back = to_array(to_tensor("x", array))
        assert back.dtype == array.dtype and back.shape == array.shape
        assert np.array_equal(back.astype(np.float64), array.astype(np.float64))


def test_a_type_that_torch_does_not_have() -> None:
    with pytest.raises(BadInput, match="update: has type"):
        to_tensor("update", np.array(["text"]))


def test_missing_inputs_and_attributes() -> None:
    arrays = Source().mha()
    with pytest.raises(BadInput, match="num_heads is missing"):
        call_of(node_of("mha", arrays), arrays)
    with pytest.raises(BadInput, match="has no attribute is_causal"):
        call_of(node_of("mha", arrays, num_heads=4, is_causal=1), arrays)
    cache = {"past_cache": Source().normal(2, 4, 6, 8), "update": Source().normal(2, 4, 2, 8)}
    with pytest.raises(BadInput, match="mode is 'round'"):
        call_of(node_of("tensor_scatter", cache, mode="round"), cache)


def test_inspect_sees_nodes_in_subgraphs(tmp_path: Path) -> None:
    model, _ = model_with_branches()
    found = inspect(save(model, tmp_path), sizes={})
    assert {node.place for node in found.nodes} == {(), ("choice.then_branch",), ("choice.else_branch",)}
    assert all(node.plan is not None and node.plan.kernel == "cpu" for node in found.nodes)
