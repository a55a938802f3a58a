"""Every way in which a model file can be unusable is one sentence, and never a traceback."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import Source, model_of, model_of_node, node_proto, onnx, save

from torch_onnx_attn.models import BadInput, find_nodes, inspect, open_model, verify
from torch_onnx_attn.models.file import with_weights


def refusal(path: Path) -> str:
    with pytest.raises(BadInput) as caught:
        find_nodes(open_model(path), path)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


@pytest.fixture
def model() -> Any:
    return model_of_node("attention", Source().qkv(), is_causal=1)


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"", "is empty"),
        (b"hello, this is text\n", "is not an ONNX model"),
        (b'{"irVersion": "10", "graph": {}}', "is not an ONNX model"),
        (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "is not an ONNX model"),
        (b"PK\x03\x04" + bytes(100), "is not an ONNX model"),
        (bytes(1000), "is not an ONNX model"),
        (b"\x08\x0a", "is not an ONNX model"),
    ],
)
def test_what_is_not_onnx_is_called_so(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    assert reason in refusal(path) and str(path) in refusal(path)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    assert "there is no such file" in refusal(tmp_path / "nothing.onnx")
    assert "is a folder" in refusal(tmp_path)


def test_every_truncation_is_noticed(tmp_path: Path, model: Any) -> None:
    path = save(model, tmp_path)
    content = path.read_bytes()
    assert find_nodes(open_model(path))
    path.write_bytes(content[: len(content) // 2])
    assert "is cut short" in refusal(path)
    for length in range(len(content) - len("com.microsoft") - 6):  # up to the last opset, of com.microsoft, which nothing here needs
        path.write_bytes(content[:length])
        refusal(path)


@pytest.mark.parametrize("seed", range(3))
def test_a_flipped_byte_gives_a_sentence_or_a_result(tmp_path: Path, seed: int) -> None:
    source = Source()
    models = [model_of_node("attention", source.qkv(), is_causal=1), model_of_node("mha", source.mha(), num_heads=4)]
    generator = random.Random(seed)
    for model in models:
        content = model.SerializeToString()
        for _ in range(60):
            damaged = bytearray(content)
            damaged[generator.randrange(len(content))] = generator.randrange(256)
            path = tmp_path / "model.onnx"
            path.write_bytes(damaged)
            for look in (verify, inspect):
                try:
                    look(path)
                except BadInput as error:
                    assert str(error)


def test_a_model_without_attention(tmp_path: Path) -> None:
    x = {"x": np.zeros((2, 3), np.float32)}
    plain = save(model_of([onnx.helper.make_node("Relu", ["x"], ["y"])], x, ["y"]), tmp_path)
    assert "has no Attention, MultiHeadAttention or TensorScatter node among its 1" in refusal(plain) and "rewrite" not in refusal(plain)
    softmax = save(model_of([onnx.helper.make_node("Softmax", ["x"], ["y"])], x, ["y"]), tmp_path)
    assert "`rewrite`" in refusal(softmax)


def test_an_attention_of_another_domain_is_not_ours(tmp_path: Path) -> None:
    node = onnx.helper.make_node("Attention", ["x"], ["y"], domain="somebody.else")
    assert "has no Attention" in refusal(save(model_of([node], {"x": np.zeros(2, np.float32)}, ["y"]), tmp_path))


@pytest.mark.parametrize(
    "attributes, reason",
    [({"is_causal": 1.0}, "is_causal is of type FLOAT; it must be INT"), ({"scale": "big"}, "scale is of type STRING")],
)
def test_an_attribute_of_the_wrong_type(tmp_path: Path, attributes: dict[str, Any], reason: str) -> None:
    assert reason in refusal(save(model_of_node("attention", Source().qkv(), **attributes), tmp_path))


# ---------------------------------------------------------------------------------------------------------------------
# External data
# ---------------------------------------------------------------------------------------------------------------------


def with_weight(location: str, **facts: int) -> Any:
    """Q is the input, K and V are one weight of external data: float32 [2, 2, 5, 8], 640 bytes."""
    weight = onnx.TensorProto(name="KV", data_type=onnx.TensorProto.FLOAT, dims=[2, 2, 5, 8], data_location=onnx.TensorProto.EXTERNAL)
    for key, entry in {"location": location, **facts}.items():
        weight.external_data.add(key=key, value=str(entry))
    node = onnx.helper.make_node("Attention", ["Q", "KV", "KV"], ["Y"], name="layer")
    return model_of([node], {"Q": Source().qkv()["Q"]}, ["Y"], initializer=[weight])


def test_external_data_are_used(tmp_path: Path) -> None:
    weights = Source(1).normal(2, 2, 5, 8)
    (tmp_path / "weights.bin").write_bytes(bytes(64) + weights.tobytes())
    path = save(with_weight("weights.bin", offset=64, length=640), tmp_path)
    held = with_weights(open_model(path), tmp_path)
    assert np.array_equal(onnx.numpy_helper.to_array(held.graph.initializer[0]), weights)
    (node,) = verify(path).nodes
    assert node.status == "agree" and node.inputs["K"] == node.inputs["V"] == "float32[2, 2, 5, 8]"
    (found,) = inspect(path).nodes
    assert found.plan is not None


@pytest.mark.parametrize(
    "location, facts, reason",
    [
        ("nothing.bin", {}, "is missing: there is no file 'nothing.bin' beside the model"),
        ("short.bin", {}, "is cut short: 'short.bin' has 100 bytes, and 640 are needed"),
        ("whole.bin", {"offset": 1, "length": 640}, "is cut short: 'whole.bin' has 640 bytes, and 641 are needed"),
        ("whole.bin", {"offset": -1}, "is cut short"),
        ("../outside.bin", {}, "lies outside the model's folder; it is not read"),
        ("inner/../../outside.bin", {}, "lies outside the model's folder"),
        ("/etc/hostname", {}, "lies outside the model's folder"),
        ("link.bin", {}, "lies outside the model's folder (it is a link that leads there)"),
        ("folder", {}, "is missing"),
        ("", {}, "has no location"),
        ("*/_ORT_MEM_ADDR_/*", {}, "was kept in memory"),
    ],
)
def test_external_data_that_cannot_be_used(tmp_path: Path, location: str, facts: dict[str, int], reason: str) -> None:
    folder = tmp_path / "models"
    (folder / "folder").mkdir(parents=True)
    (folder / "short.bin").write_bytes(bytes(100))
    (folder / "whole.bin").write_bytes(bytes(640))
    (tmp_path / "outside.bin").write_bytes(bytes(640))
    os.symlink(tmp_path / "outside.bin", folder / "link.bin")
    sentence = refusal(save(with_weight(location, **facts), folder))
    assert reason in sentence and "KV" in sentence


def test_external_data_of_a_constant_in_a_subgraph_are_checked(tmp_path: Path) -> None:
    outside = onnx.TensorProto(name="c", data_type=onnx.TensorProto.FLOAT, dims=[1], data_location=onnx.TensorProto.EXTERNAL)
    outside.external_data.add(key="location", value="../secret")
    constant = onnx.helper.make_node("Constant", [], ["c"])
    constant.attribute.append(onnx.AttributeProto(name="value", type=onnx.AttributeProto.TENSOR, t=outside))
    branch = onnx.helper.make_graph([constant], "branch", [], [onnx.helper.make_empty_tensor_value_info("c")])
    choice = onnx.helper.make_node("If", ["p"], ["r"], then_branch=branch, else_branch=branch)
    arrays = Source().qkv()
    model = model_of([node_proto("attention", arrays, ["Y"]), choice], arrays | {"p": np.array(True)}, ["Y", "r"])
    assert "lies outside" in refusal(save(model, tmp_path))
