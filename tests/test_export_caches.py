"""Cache ops: TensorScatter nodes, in-place calls through their pure bodies, and valid_kv_length in small nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from export_support import ORT_IS_CURRENT, attributes, export, onnx
from torch import Tensor

OPS = torch.ops.onnx_attn
BATCH, HEADS, CAPACITY, SIZE = 2, 2, 12, 8


def new_cache(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(BATCH, HEADS, CAPACITY, SIZE).to(dtype)


def new_rows(rows: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(BATCH, HEADS, rows, SIZE).to(dtype)


# ------------------------------------------------------------------------------------------------------ tensor_scatter


@pytest.mark.parametrize(
    ("inputs", "options", "written"),
    [
        pytest.param({"cache": new_cache(), "update": new_rows(), "at": torch.tensor([0, 5])}, {}, {}, id="linear"),
        pytest.param(
            {"cache": new_cache(), "update": new_rows(), "at": torch.tensor([7, 2])},
            {"circular": True},
            {"mode": b"circular"},
            id="circular",
        ),
        pytest.param({"cache": new_cache(), "update": new_rows(), "at": torch.tensor([1, 6])}, {"axis": 2}, {}, id="axis_2_is_the_default"),
        pytest.param(
            {"cache": torch.randn(2, 9, 2, 8), "update": torch.randn(2, 3, 2, 8), "at": torch.tensor([1, 6])},
            {"axis": 1},
            {"axis": 1},
            id="rows_before_heads",
        ),
        pytest.param({"cache": torch.randn(2, 9, 8), "update": torch.randn(2, 3, 8), "at": torch.tensor([1, 6])}, {}, {}, id="three_axes"),
        pytest.param({"cache": new_cache(), "update": new_rows()}, {}, {}, id="no_indices"),
        pytest.param(
            {"cache": new_cache(torch.float16), "update": new_rows(dtype=torch.float16), "at": torch.tensor([1, 6])}, {}, {}, id="float16"
        ),
    ],
)
@pytest.mark.parametrize("in_place", [False, True])
def test_tensor_scatter(inputs: dict[str, Tensor], options: dict[str, Any], written: dict[str, Any], in_place: bool) -> None:
    def pure(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"written": OPS.tensor_scatter(tensors["cache"], tensors["update"], tensors.get("at"), **options)}

    def writing(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        OPS.tensor_scatter_(tensors["cache"], tensors["update"], tensors.get("at"), **options)
        return {"written": tensors["cache"]}

    exported = export(writing if in_place else pure, inputs)
    assert exported.types == ["TensorScatter"] and exported.opset == 24
    node = exported.node("TensorScatter")
    assert list(node.input) == list(inputs) and list(node.output) == ["written"]
    assert attributes(node) == written
    for where in ("ort", "reference"):
        exported.agrees(where, tolerance=0.0)


def test_a_write_that_is_not_returned_is_not_in_the_graph() -> None:
    """The exporter's rule: a graph has the outputs of forward, and no other effects."""

    def call(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        OPS.tensor_scatter_(tensors["cache"], tensors["update"], tensors["at"])
        return {"sum": tensors["update"] + 1}

    exported = export(call, {"cache": new_cache(), "update": new_rows(), "at": torch.tensor([0, 5])})
    assert exported.types == ["Add"]


# ---------------------------------------------------------------------------------------------------- attention_cached


def cached_inputs(three_axes: bool = False, rows: int = 3, batch: int = BATCH) -> dict[str, Tensor]:
    Q, K, V = torch.randn(batch, 4, rows, SIZE), torch.randn(batch, HEADS, rows, SIZE), torch.randn(batch, HEADS, rows, SIZE)
    if three_axes:
        Q, K, V = (x.transpose(1, 2).flatten(2) for x in (Q, K, V))
    caches = {"key_cache": torch.randn(batch, HEADS, CAPACITY, SIZE), "value_cache": torch.randn(batch, HEADS, CAPACITY, SIZE)}
    return {"Q": Q, "K": K, "V": V, **caches, "cache_lengths": torch.tensor([1, 4, 0][:batch])}


def attend_cached(tensors: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    names = ("Q", "K", "V", "key_cache", "value_cache", "cache_lengths")
    Y = OPS.attention_cached(*(tensors[name] for name in names), attn_mask=tensors.get("attn_mask"), **options)
    return {"Y": Y, "keys": tensors["key_cache"], "values": tensors["value_cache"]}


@pytest.mark.parametrize(
    ("options", "opset", "written"),
    [
        pytest.param({}, 24, {}, id="plain"),
        pytest.param({"is_causal": True}, 24, {"is_causal": 1}, id="causal"),
        pytest.param({"scale": 0.5, "softcap": 2.0}, 24, {"scale": 0.5, "softcap": 2.0}, id="scale_softcap"),
        pytest.param({"is_causal": True, "left_window_size": 2}, 25, {"is_causal": 1, "left_window_size": 2}, id="window"),
    ],
)
def test_attention_cached(options: dict[str, Any], opset: int, written: dict[str, Any]) -> None:
    exported = export(lambda tensors: attend_cached(tensors, **options), cached_inputs())
    assert exported.opset == opset
    assert exported.types == ["TensorScatter", "TensorScatter", "Add", "Attention"]
    keys, values, lengths, node = exported.nodes
    assert list(keys.input) == ["key_cache", "K", "cache_lengths"] and list(keys.output) == ["keys"]
    assert list(values.input) == ["value_cache", "V", "cache_lengths"] and list(values.output) == ["values"]
    assert lengths.input[0] == "cache_lengths"
    assert list(node.input) == ["Q", "keys", "values", "", "", "", lengths.output[0]] and list(node.output) == ["Y"]
    assert attributes(node) == written
    exported.agrees("reference")
    if opset < 25 or ORT_IS_CURRENT:
        exported.agrees("ort")


def test_attention_cached_with_a_mask() -> None:
    inputs = cached_inputs() | {"attn_mask": torch.rand(BATCH, 1, 3, CAPACITY) < 0.7}
    exported = export(attend_cached, inputs)
    assert list(exported.node("Attention").input)[3] == "attn_mask"
    exported.agrees("ort")


def test_attention_cached_three_axes() -> None:
    """The caches have four axes, so the graph splits the heads of Q, K and V."""
    inputs = cached_inputs(three_axes=True)
    exported = export(lambda tensors: attend_cached(tensors, is_causal=True, q_num_heads=4, kv_num_heads=HEADS), inputs)
    assert exported.types.count("Attention") == 1 and exported.types.count("TensorScatter") == 2
    assert set(exported.types) <= {"Attention", "TensorScatter", "Add", "Reshape", "Transpose"}
    assert attributes(exported.node("Attention")) == {"is_causal": 1}
    exported.agrees("ort")


def test_attention_cached_serves_prompt_and_tokens() -> None:
    dynamic: dict[str, dict[int, str]] = {name: {0: "batch", 2: "rows"} for name in "QKV"}
    dynamic |= {name: {0: "batch"} for name in ("key_cache", "value_cache", "cache_lengths")}
    exported = export(lambda tensors: attend_cached(tensors, is_causal=True), cached_inputs(), dynamic=dynamic)
    assert exported.types.count("Attention") == 1 and exported.types.count("TensorScatter") == 2
    assert not {"Reshape", "Transpose", "Slice", "Expand", "Where"} & set(exported.types)
    for rows, batch in ((1, 2), (5, 1), (1, 1), (2, 3)):
        exported.agrees("ort", cached_inputs(rows=rows, batch=batch))


def test_two_steps_through_the_file() -> None:
    """The caches that come out go in again."""
    inputs = cached_inputs()
    exported = export(lambda tensors: attend_cached(tensors, is_causal=True), inputs)
    once = exported.eager
    again = inputs | {"key_cache": once["keys"], "value_cache": once["values"], "cache_lengths": inputs["cache_lengths"] + 3}
    exported.agrees("ort", again)


def test_only_the_exporter_sees_the_pure_form() -> None:
    """Compiled code writes the caches in place; the pure form would copy each of them twice per step."""
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _example: Any) -> Any:
        graphs.append(graph)
        return graph

    def step(Q: Tensor, K: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        return OPS.attention_cached(Q, K, K, keys, values, lengths)

    names = ("Q", "K", "key_cache", "value_cache", "cache_lengths")
    inputs = cached_inputs()
    torch.compile(step, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(*(inputs[name] for name in names))
    (graph,) = graphs
    assert OPS.tensor_scatter.default not in {node.target for node in graph.graph.nodes}


# ------------------------------------------------------------------------------------------------------ valid_kv_length

MASKS = {
    "left_padded": torch.tensor([[False, True, True, False], [False, False, True, True]])[:, None, None],
    "nothing_allowed": torch.zeros(3, 1, 2, 4, dtype=torch.bool),
    "heads_differ": torch.tensor([[[True, False, False], [False, True, False]]])[:, :, None],
    "last_row_counts": torch.tensor([[True, True, True], [True, False, False]])[None, None],
    "heads_only": torch.rand(3, 2, 5) < 0.5,
    "one_matrix": torch.rand(4, 5) < 0.5,
    "one_row": torch.tensor([True, True, False]),
    "float": torch.tensor([[0.0, -999.0, -1000.0, float("-inf")], [float("-inf")] * 4])[:, None, None],
    "float16": torch.tensor([[0.0, -1.0, -65504.0], [-65504.0] * 3], dtype=torch.float16)[:, None, None],
    "bfloat16": torch.tensor([[0.0, 1.0, -1e38]], dtype=torch.bfloat16)[:, None, None],
}


def lengths_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"lengths": OPS.valid_kv_length(tensors["mask"])}


@pytest.mark.parametrize("name", MASKS)
def test_valid_kv_length(name: str) -> None:
    exported = export(lengths_of, {"mask": MASKS[name]})
    assert 6 <= len(exported.types) <= 8 and "Shape" not in exported.types
    if MASKS[name].dim() >= 2:
        assert exported.types[0] == "Gather"  # everything else sees one row of the mask only
    exported.agrees("reference")
    if MASKS[name].dtype != torch.bfloat16:
        exported.agrees("ort")


def test_valid_kv_length_of_any_size() -> None:
    exported = export(lengths_of, {"mask": torch.rand(2, 1, 3, 5) < 0.5}, dynamic={"mask": {0: "batch", 2: "q_len", 3: "kv_len"}})
    for shape in ((1, 1, 1, 1), (3, 1, 2, 17), (1, 1, 4, 2)):
        exported.agrees("ort", {"mask": torch.rand(shape) < 0.5})


def test_valid_kv_length_feeds_attention() -> None:
    """A decode step over a static cache: the length comes from the mask, on the device."""

    def step(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        lengths = OPS.valid_kv_length(tensors["mask"])
        return {"Y": OPS.attention.default(tensors["Q"], tensors["K"], tensors["K"], tensors["mask"], nonpad_kv_seqlen=lengths)}

    mask = torch.tensor([[False, True, True, False], [True, True, True, True]])[:, None, None]
    exported = export(step, {"Q": torch.randn(2, 4, 1, 8), "K": torch.randn(2, 2, 4, 8), "mask": mask})
    assert exported.opset == 24
    assert exported.node("Attention").input[6]
    exported.agrees("ort")


def test_every_model_here_is_of_a_released_ir() -> None:
    exported = export(lengths_of, {"mask": MASKS["one_row"]})
    assert exported.proto.ir_version <= onnx.IR_VERSION
