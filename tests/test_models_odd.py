"""Models and arrays that somebody could bring, and hardly anybody does: each is read rightly, or refused in one sentence."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_files import Source, model_of, model_of_node, node_of, node_proto, onnx, save, value

from torch_onnx_attn import reference
from torch_onnx_attn.archive import read_archive
from torch_onnx_attn.models import BadInput, find_nodes, inspect, judge, open_model, verify
from torch_onnx_attn.models.node_call import call_of

make = onnx.helper


def refusal(path: Path, **arguments: Any) -> str:
    with pytest.raises(BadInput) as caught:
        verify(path, **arguments)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


# ---------------------------------------------------------------------------------------------------------------------
# Graphs
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_then", [True, False])
def test_branches_beside_each_other_may_use_one_name_for_different_values(tmp_path: Path, is_then: bool) -> None:
    """What is judged is the node that ran, with its own attributes; what comes behind sees what it made."""
    arrays = Source().qkv()
    branches = {
        name: make.make_graph(
            [make.make_node("Attention", ["Q", "K", "V"], ["Y"], name=name, **attributes)], name, [], [value("Y", arrays["Q"])]
        )
        for name, attributes in (("causal", {"is_causal": 1}), ("scaled", {"scale": 3.0}))
    }
    choice = make.make_node("If", ["p"], ["R"], then_branch=branches["causal"], else_branch=branches["scaled"])
    path = save(model_of([choice], arrays | {"p": np.array(is_then)}, ["R"]), tmp_path)
    status = {node.node: (node.status, node.executions) for node in verify(path, arrays | {"p": np.array(is_then)}).nodes}
    ran, idle = ("causal", "scaled") if is_then else ("scaled", "causal")
    assert status == {ran: ("agree", 1), idle: ("not executed", 0)}


def test_nodes_behind_a_branch_see_what_that_branch_made(tmp_path: Path) -> None:
    """In a loop, so that onnx.reference runs all of it."""
    arrays = Source().qkv()
    Q = value("Y", arrays["Q"])
    branches = [
        make.make_graph([make.make_node("Attention", ["q", "K", "V"], ["Y"], scale=scale)], "branch", [], [Q]) for scale in (0.25, 3.0)
    ]
    steps = [
        make.make_node("If", ["p"], ["r"], then_branch=branches[0], else_branch=branches[1]),
        make.make_node("Attention", ["r", "K", "V"], ["z"], name="behind"),
        make.make_node("Identity", ["go"], ["goes"]),
    ]
    true = np.array(True)
    body = make.make_graph(
        steps,
        "body",
        [value("i", np.array(1)), value("go", true), value("q", arrays["Q"])],
        [value("goes", true), value("z", arrays["Q"])],
    )
    loop = make.make_node("Loop", ["n", "", "Q"], ["R"], body=body)
    given = arrays | {"n": np.array(1), "p": true}
    path = save(model_of([loop], given, ["R"]), tmp_path)
    seen = observed(path, given)["behind"][0]["Q"]
    tensors = [torch.from_numpy(arrays[name]) for name in ("Q", "K", "V")]
    np.testing.assert_allclose(seen, reference.attention(*tensors, scale=0.25).Y.numpy(), rtol=1e-5, atol=1e-5)


def observed(path: Path, feeds: dict[str, Any]) -> Any:
    from torch_onnx_attn.models.running import observe

    model = open_model(path)
    return observe(model, find_nodes(model), feeds, path.parent).seen


def test_both_names_of_the_domain_of_onnx(tmp_path: Path) -> None:
    model = model_of_node("attention", Source().qkv(), is_causal=1)
    model.opset_import[0].domain = "ai.onnx"
    model.graph.node[0].domain = "ai.onnx"
    (node,) = verify(save(model, tmp_path)).nodes
    assert node.operator == "ai.onnx::Attention-24" and node.status == "agree" and not node.refusals


def test_a_function_of_another_opset_is_brought_to_that_of_the_model(tmp_path: Path) -> None:
    node = make.make_node("Attention", ["q", "k", "v"], ["y"], is_causal=1)
    function = make.make_function("own", "Attend", ["q", "k", "v"], ["y"], [node], [make.make_opsetid("", 23)])
    call = make.make_node("Attend", ["Q", "K", "V"], ["Y"], domain="own")
    (found,) = verify(save(model_of([call], Source().qkv(), ["Y"], functions=[function]), tmp_path)).nodes
    assert found.operator == "ai.onnx::Attention-24" and found.status == "agree" and "causal" in found.features


@pytest.mark.parametrize(
    "op, opset, attributes, needed",
    [("attention", 22, {}, 23), ("attention", 1, {}, 23), ("attention", 24, {"left_window_size": 1}, 25), ("tensor_scatter", 23, {}, 24)],
)
def test_a_node_that_its_opset_does_not_have_is_refused(
    tmp_path: Path, op: str, opset: int, attributes: dict[str, Any], needed: int
) -> None:
    source = Source()
    arrays = source.qkv() if op == "attention" else {"past_cache": source.normal(2, 2, 5, 8), "update": source.normal(2, 2, 1, 8)}
    path = save(model_of_node(op, arrays, opset=opset, **attributes), tmp_path)
    result = verify(path)
    assert result.failures() and result.nodes[0].status == "refused"
    assert f"needs opset {needed} of ai.onnx, and the model has {opset}" in result.nodes[0].verdict
    assert inspect(path).needed_opset == needed


@pytest.mark.parametrize(
    "domain, version, reason", [("", 99, "imports opset 99 of ai.onnx"), ("com.microsoft", 2, "imports opset 2 of com.microsoft")]
)
def test_an_opset_that_nobody_knows_is_refused(tmp_path: Path, domain: str, version: int, reason: str) -> None:
    model = model_of_node("mha", Source().mha(), num_heads=4) if domain else model_of_node("attention", Source().qkv())
    for entry in model.opset_import:
        entry.version = version if entry.domain == domain else entry.version
    assert reason in refusal(save(model, tmp_path))


@pytest.mark.parametrize("what, count", [("input", 8), ("output", 5)])
def test_more_inputs_or_outputs_than_the_operator_has(tmp_path: Path, what: str, count: int) -> None:
    model = model_of_node("attention", Source().qkv())
    names = getattr(model.graph.node[0], what)
    names.extend(["Q"] * (count - len(names)) if what == "input" else [f"more{i}" for i in range(count - 1)])
    assert f"node layer: has {count} {what}s; Attention has at most {count - 1}" in refusal(save(model, tmp_path))


def test_flags_that_are_neither_0_nor_1() -> None:
    """ONNX Runtime, which defines MultiHeadAttention, has `unidirectional` on for 1 only. ONNX says what 0 and 1 mean for `is_causal`."""
    arrays = Source().mha(4, 4)
    assert call_of(node_of("mha", arrays, num_heads=4, unidirectional=2), arrays).attributes["unidirectional"] is False
    assert judge(node_of("mha", arrays, num_heads=4, unidirectional=2), arrays).status == "agree"
    arrays = Source().qkv()
    found = judge(node_of("attention", arrays, is_causal=7), arrays)
    assert found.status == "refused" and "is_causal is 7; ONNX gives a meaning to 0 and 1 only" in found.verdict


@pytest.mark.parametrize("has_bias", [True, False])
def test_presents_without_a_past_where_values_have_another_head_size(has_bias: bool) -> None:
    source = Source()
    arrays = {"query": source.normal(2, 3, 32), "key": source.normal(2, 5, 32), "value": source.normal(2, 5, 48)}
    if has_bias:
        arrays["bias"] = source.normal(32 + 32 + 48)
    found = judge(node_of("mha", arrays, ["output", "present_key", "present_value", "qk"], num_heads=4), arrays)
    assert found.status == "agree" and len(found.outputs) == 4
    bias = arrays.get("bias", np.zeros(112, np.float32))[64:]
    made = call_of(node_of("mha", arrays, ["output", "present_value"], num_heads=4), arrays).run()["present_value"]
    np.testing.assert_allclose(made.numpy(), (arrays["value"] + bias).reshape(2, 5, 4, 12).swapaxes(1, 2), rtol=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# Inputs
# ---------------------------------------------------------------------------------------------------------------------


def test_a_size_of_minus_one_is_a_size_that_is_not_known(tmp_path: Path) -> None:
    model = model_of_node("attention", Source().qkv())
    for entry in model.graph.input:
        entry.type.tensor_type.shape.dim[0].dim_value = -1
    path = save(model, tmp_path)
    result = verify(path)
    assert result.nodes[0].status == "agree" and result.made_up["Q"] == "float32[8, 4, 3, 8]"
    assert inspect(path).sizes["Q"] == (128, 4, 3, 8)


@pytest.mark.parametrize("size", [2**61, 10**30])
def test_a_size_that_no_array_has(tmp_path: Path, size: int) -> None:
    model = model_of_node("attention", Source().qkv())
    for entry in model.graph.input:
        entry.type.tensor_type.shape.dim[2].dim_param = "rows"
    path = save(model, tmp_path)
    assert "is larger than any array can be" in refusal(path, sizes={"rows": size})
    with pytest.raises(BadInput, match="is larger than any array can be"):
        inspect(path, sizes={"rows": size})


def test_a_model_with_a_sequence_input_can_be_inspected(tmp_path: Path) -> None:
    model = model_of_node("attention", Source().qkv())
    model.graph.input.append(make.make_tensor_sequence_value_info("sequence", 1, None))
    path = save(model, tmp_path)
    (node,) = inspect(path).nodes
    assert node.plan is not None
    assert "input sequence: is no tensor" in refusal(path)


def test_every_damage_to_a_compressed_archive_is_one_sentence(tmp_path: Path) -> None:
    """zlib, zipfile and numpy have errors of their own, and a member that is no array comes as bytes."""
    path = tmp_path / "inputs.npz"
    np.savez_compressed(path, Q=Source().normal(4, 8))
    content = path.read_bytes()
    for position in range(0, len(content), 3):
        for byte in (0, 99, 255):
            path.write_bytes(content[:position] + bytes([byte]) + content[position + 1 :])
            try:
                read_archive(path, "a file of arrays")
            except BadInput as error:
                assert str(error).startswith(f"{path}: is not a file of arrays")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("Q", "text")
    with pytest.raises(BadInput, match="'Q' is no array"):
        read_archive(path, "a file of arrays")


# ---------------------------------------------------------------------------------------------------------------------
# External data
# ---------------------------------------------------------------------------------------------------------------------


def with_external(folder: Path, location: str, data_type: int, dims: list[int]) -> Path:
    (folder / "weights.bin").write_bytes(bytes(8))
    weight = onnx.TensorProto(name="W", data_type=data_type, dims=dims, data_location=onnx.TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value=location)
    arrays = Source().qkv()
    return save(model_of([node_proto("attention", arrays, ["Y"])], arrays, ["Y"], initializer=[weight]), folder)


@pytest.mark.parametrize(
    "location, data_type, dims, reason",
    [
        ("a\0b", 1, [2], "which no file can have"),
        ("x" * 300, 1, [2], "which no file can have"),
        ("weights.bin", onnx.TensorProto.STRING, [2], "cannot be STRING"),
        ("weights.bin", onnx.TensorProto.UNDEFINED, [2], "cannot be UNDEFINED"),
        ("weights.bin", 1, [-2], r"cannot be FLOAT of shape [-2]"),
        ("weights.bin", onnx.TensorProto.INT4, [17], "has 8 bytes, and 9 are needed"),
    ],
)
def test_external_data_that_no_writer_writes(tmp_path: Path, location: str, data_type: int, dims: list[int], reason: str) -> None:
    sentence = refusal(with_external(tmp_path, location, data_type, dims))
    assert reason in sentence and "W" in sentence


def test_two_numbers_of_four_bits_are_one_byte(tmp_path: Path) -> None:
    assert verify(with_external(tmp_path, "weights.bin", onnx.TensorProto.INT4, [16])).nodes[0].status == "agree"


@pytest.mark.parametrize("change, reason", [("raw_data", "W has 7 bytes, and its shape needs 8"), ("float_data", "W cannot be read")])
def test_constants_with_more_or_less_data_than_their_shape(tmp_path: Path, change: str, reason: str) -> None:
    weight = onnx.TensorProto(name="W", data_type=1, dims=[2])
    if change == "raw_data":
        weight.raw_data = bytes(7)
    else:
        weight.float_data.extend([1.0, 2.0, 3.0])
    arrays = Source().qkv()
    path = save(model_of([node_proto("attention", arrays, ["Y"])], arrays, ["Y"], initializer=[weight]), tmp_path)
    assert reason in refusal(path)


@pytest.mark.parametrize("shape, heads, reason", [((), 4, "query: "), ((2, 3, 32), 0, "num_heads: is 0")])
def test_what_the_op_refuses_is_refused_with_presents_too(shape: tuple[int, ...], heads: int, reason: str) -> None:
    arrays = {name: np.ones(shape, np.float32) for name in ("query", "key", "value")}
    found = judge(node_of("mha", arrays, ["output", "present_key", "present_value"], num_heads=heads), arrays)
    assert found.status == "refused" and reason in found.verdict
