"""`inspect`: what a model's attention nodes use, who takes them, and which kernel they would take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from model_files import Source, model_of, model_of_node, node_proto, onnx, save

from torch_onnx_attn import H200, Machine, explain
from torch_onnx_attn.models import BadInput, inspect, load_node
from torch_onnx_attn.models.inspect import NodeFacts
from torch_onnx_attn.models.node import find_nodes
from torch_onnx_attn.models.shapes import Kind, infer

AMPERE = Machine(True, 80, 108, 166912)


def look(tmp_path: Path, model: Any, machine: Machine | None = H200, **sizes: int) -> NodeFacts:
    (node,) = inspect(save(model, tmp_path), machine=machine, sizes=sizes).nodes
    return node


def levels(node: NodeFacts) -> dict[str, str]:
    return {view.runtime: view.level for view in node.runtimes}


def reasons(node: NodeFacts, runtime: str) -> tuple[str, ...]:
    return next(view.reasons for view in node.runtimes if view.runtime == runtime)


def test_the_kernel_is_the_one_that_explain_names(tmp_path: Path) -> None:
    arrays = Source().qkv(300, 300, dtype=np.float16, size=64)
    model = model_of_node("attention", arrays, is_causal=1)
    path = save(model, tmp_path)
    call = load_node(path, "layer").call(**{name: __import__("torch").from_numpy(array) for name, array in arrays.items()})
    for machine, kernel in ((H200, "forward_sm90"), (AMPERE, "forward_sm80"), (None, "cpu")):
        (node,) = inspect(path, machine=machine).nodes
        assert node.plan == explain(call.prepare(), machine=machine)
        assert node.plan.kernel == kernel and node.obstacle == ""
    (node,) = inspect(path, machine=AMPERE).nodes
    assert node.plan is not None and "9.0" in node.plan.refusals["forward_sm90"]


def test_nothing_is_allocated_for_sizes_that_do_not_fit_in_memory(tmp_path: Path) -> None:
    arrays = Source().qkv(dtype=np.float16, size=128)
    model = model_of_node("attention", arrays)
    for entry, name in zip(model.graph.input, ("rows", "keys", "keys"), strict=True):
        entry.type.tensor_type.shape.dim[2].dim_param = name
    node = look(tmp_path, model, rows=1, keys=2**22)  # 2 GiB each for K and V
    assert node.plan is not None and node.plan.kernel == "decode"
    assert node.inputs["K"] == f"float16[2, 2, {2**22}, 128]"


@pytest.mark.parametrize(
    "op, arrays, outputs, opset, attributes, features, needed",
    [
        ("attention", Source().qkv(), ["Y"], 23, {}, ["grouped heads 4/2"], 23),
        ("attention", Source().qkv(kv_heads=4), ["Y"], 25, {}, [], 23),
        (
            *("attention", Source().qkv(kv_heads=4) | {"nonpad_kv_seqlen": np.array([1, 5])}, ["Y"], 24),
            {"is_causal": 1, "softcap": 30.0, "scale": 0.5},
            ["causal", "lengths", "softcap 30", "scale 0.5"],
            24,
        ),
        (
            *("attention", Source().qkv(kv_heads=4) | {"attn_mask": Source().keep(3, 5)}, ["Y", "qk_matmul_output"], 25),
            {"left_window_size": 4, "qk_matmul_output_mode": 2},
            ["window 4 before, all after", "boolean mask", "scores, mode 2"],
            25,
        ),
        (
            *("attention", Source().qkv(kv_heads=4) | Source().past(heads=4), ["Y", "present_key", "present_value"], 23),
            {},
            ["past and present"],
            23,
        ),
        (
            *("mha", Source().mha() | {"bias": Source().normal(96), "key_padding_mask": np.array([3, 5], np.int32)}, ["output"], 24),
            {"num_heads": 4, "unidirectional": 1},
            ["causal, bottom-right", "padding mask", "projection bias"],
            None,
        ),
        (
            *("tensor_scatter", {"past_cache": Source().normal(2, 6, 8), "update": Source().normal(2, 2, 8)}, ["present_cache"], 24),
            {"mode": "circular"},
            ["circular"],
            24,
        ),
    ],
)
def test_features_and_the_opset_they_need(
    tmp_path: Path, op: str, arrays: Any, outputs: list[str], opset: int, attributes: Any, features: list[str], needed: int | None
) -> None:
    model = model_of_node(op, arrays, outputs, opset, **attributes)
    found = inspect(save(model, tmp_path))
    assert list(found.nodes[0].features) == features
    assert found.nodes[0].needed_opset == found.needed_opset == needed and found.opset == opset


def test_runtimes_take_what_they_take(tmp_path: Path) -> None:
    plain = look(tmp_path, model_of_node("attention", Source().qkv(), opset=24))
    assert set(levels(plain).values()) == {"takes"}
    window = look(tmp_path, model_of_node("attention", Source().qkv(), opset=25, left_window_size=2))
    assert levels(window) == {"ONNX Runtime 1.32 CPU": "expands", "ONNX Runtime 1.30 CPU": "refuses", "onnx.reference 1.23": "takes"}
    half = look(tmp_path, model_of_node("attention", Source().qkv(dtype=ml_dtypes.bfloat16)))
    assert levels(half)["ONNX Runtime 1.32 CPU"] == "refuses"
    mask = look(tmp_path, model_of_node("attention", Source().qkv() | {"attn_mask": Source().keep(2, 1, 1, 5)}))
    assert "expand it, or use opset 25" in reasons(mask, "ONNX Runtime 1.32 CPU")[0]
    scores = look(tmp_path, model_of_node("attention", Source().qkv(), ["Y", "qk_matmul_output"], softcap=1.0))
    assert levels(scores)["onnx.reference 1.23"] == "takes" and "score mode 0" in reasons(scores, "onnx.reference 1.23")[0]


def test_a_node_that_is_not_valid_says_so_instead_of_a_kernel(tmp_path: Path) -> None:
    node = look(tmp_path, model_of_node("attention", Source().qkv() | {"attn_mask": np.ones((3, 9), bool)}))
    assert node.plan is None and node.obstacle.startswith("torch_onnx_attn refuses: attn_mask")
    node = look(tmp_path, model_of_node("tensor_scatter", {"past_cache": Source().normal(2, 6, 8), "update": Source().normal(2, 2, 8)}))
    assert node.plan is None and "copies" in node.obstacle


# ---------------------------------------------------------------------------------------------------------------------
# Shapes
# ---------------------------------------------------------------------------------------------------------------------


def chain(operator: tuple[str, str], **attributes: Any) -> Any:
    """Two MultiHeadAttention nodes with another operator between them."""
    first = node_proto("mha", ["query", "key", "value"], ["output"], name="first", num_heads=4)
    between = onnx.helper.make_node(operator[1], ["output", "weight"], ["hidden"], domain=operator[0], **attributes)
    second = onnx.helper.make_node(
        "MultiHeadAttention", ["hidden", "key", "value"], ["Z"], name="second", domain="com.microsoft", num_heads=2
    )
    weight = onnx.numpy_helper.from_array(Source().normal(32, 32), "weight")
    return model_of([first, between, second], Source().mha(), ["Z"], initializer=[weight])


def test_shapes_go_through_operators_that_onnx_does_not_know(tmp_path: Path) -> None:
    found = inspect(save(chain(("", "MatMul")), tmp_path))
    assert found.nodes[1].inputs["query"] == "float32[2, 3, 32]" and found.nodes[1].plan is not None


def test_onnxruntime_is_asked_for_what_is_missing(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = chain(("com.microsoft", "FusedMatMul"), alpha=0.5)
    for axis, name in ((0, "batch"), (1, "rows")):
        for entry in model.graph.input[: 1 if axis else 3]:
            entry.type.tensor_type.shape.dim[axis].dim_param = name
    found = inspect(save(model, tmp_path), sizes={"rows": 7})
    assert found.nodes[1].inputs["query"] == "float32[1, 7, 32]" and found.nodes[1].plan is not None


def test_a_shape_that_nobody_knows(tmp_path: Path) -> None:
    arrays = Source().qkv() | {"x": Source().normal(2, 4, 3, 8)}
    strange = onnx.helper.make_node("Strange", ["x"], ["y"], domain="com.microsoft")
    node = onnx.helper.make_node("Attention", ["y", "K", "V"], ["Y"], name="layer")
    found = look(tmp_path, model_of([strange, node], {name: arrays[name] for name in ("x", "K", "V")}, ["Y"]))
    assert found.plan is None and found.obstacle == "the shape of Q is not known" and found.inputs["Q"] == "?"
    assert levels(found)["onnx.reference 1.23"] == "takes"


def test_symbolic_sizes(tmp_path: Path) -> None:
    model = model_of_node("attention", Source().qkv())
    for entry in model.graph.input:
        entry.type.tensor_type.shape.dim[0].dim_param = "batch_size"
        entry.type.tensor_type.shape.dim[2].dim_param = "length"
    assert look(tmp_path, model).inputs["Q"] == "float32[1, 4, 128, 8]"
    assert look(tmp_path, model, batch_size=3, length=7).inputs["Q"] == "float32[3, 4, 7, 8]"
    with pytest.raises(BadInput, match="--dim lenght: no input has such a dimension; there are batch_size, length"):
        look(tmp_path, model, lenght=7)


def test_kinds_read_like_types() -> None:
    assert str(Kind(1, (2, None))) == "float32[2, ?]" and str(Kind(11, None)) == "float64" and str(Kind(16, ())) == "bfloat16[]"
    model = model_of_node("attention", Source().qkv())
    assert find_nodes(model) and infer(model, {"Q": (9, 4, 3, 8)}, ".")["Q"] == Kind(1, (9, 4, 3, 8))
