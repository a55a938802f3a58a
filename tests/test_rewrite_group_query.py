"""com.microsoft::GroupQueryAttention rewritten, against ONNX Runtime's own kernel on every way of using its lengths."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx_ir
import pytest
from export_support import needs_current_ort
from rewrite_models import by_onnxruntime, onnx, rewritten

from torch_onnx_attn.models.rewrite import rewrite, rewrite_file

HEADS, KV_HEADS, SIZE, POSITIONS = 4, 2, 16, 64
FLOAT, INT32, INT64 = 1, 6, 7
CACHE = ("past_key", "past_value", "present_key", "present_value")


@dataclasses.dataclass(frozen=True)
class Use:
    """One call: new rows, rows of the cache that is passed, valid rows of each entry after the call, and the total length."""

    new: int
    past: int
    lengths: tuple[int, ...]

    @property
    def total(self) -> int:
        return max(self.lengths)


USES = {
    "prompt": Use(5, 0, (5, 5)),
    "padded prompt": Use(5, 0, (5, 3)),
    "decode, cache grows": Use(1, 6, (7, 7)),
    "decode, entries of other lengths": Use(1, 6, (7, 4)),
    "decode in a buffer": Use(1, 9, (7, 4)),
    "decode fills a buffer": Use(1, 9, (9, 2)),
    "some rows behind a past": Use(3, 6, (9,)),
    "some rows in a buffer": Use(3, 9, (7,)),
    "prompt in a buffer": Use(5, 9, (5, 5)),
}


def model(
    names: tuple[str, ...] = ("q", "k", "v", "past_key", "past_value", "lengths", "total"), opset: int = 21, **attributes: Any
) -> Any:
    """One node. `names` are its inputs; past and present have different symbolic lengths."""
    width = HEADS * SIZE if "k" in names else (HEADS + 2 * KV_HEADS) * SIZE
    shapes = {
        "q": (FLOAT, ("batch", "new", width)),
        "k": (FLOAT, ("batch", "new", KV_HEADS * SIZE)),
        "v": (FLOAT, ("batch", "new", KV_HEADS * SIZE)),
        "past_key": (FLOAT, ("batch", KV_HEADS, "past", SIZE)),
        "past_value": (FLOAT, ("batch", KV_HEADS, "past", SIZE)),
        "lengths": (INT32, ("batch",)),
        "total": (INT32, (1,)),
        "cosines": (FLOAT, (POSITIONS, SIZE // 2)),
        "sines": (FLOAT, (POSITIONS, SIZE // 2)),
        "positions": (INT64, ("batch", "new")),
        "bias": (FLOAT, (1, HEADS, "new", "total_length")),
        "sink": (FLOAT, (HEADS,)),
    }
    value = onnx.helper.make_tensor_value_info
    present = ("batch", KV_HEADS, "present", SIZE)
    outputs = [
        value("y", FLOAT, ("batch", "new", HEADS * SIZE)),
        value("present_key", FLOAT, present),
        value("present_value", FLOAT, present),
    ]
    node = onnx.helper.make_node(
        "GroupQueryAttention",
        list(names),
        ["y", "present_key", "present_value"],
        name="layer",
        domain="com.microsoft",
        num_heads=HEADS,
        kv_num_heads=KV_HEADS,
        **attributes,
    )
    graph = onnx.helper.make_graph([node], "g", [value(name, *shapes[name]) for name in names if name], outputs)
    imports = [onnx.helper.make_opsetid("", opset), onnx.helper.make_opsetid("com.microsoft", 1)]
    return onnx.helper.make_model(graph, opset_imports=imports, ir_version=10)


def arrays(proto: Any, use: Use) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    angles = generator.random((POSITIONS, SIZE // 2)) * 3
    sizes = {"batch": len(use.lengths), "new": use.new, "past": use.past}
    made: dict[str, Any] = {}
    for value in proto.graph.input:
        dims = value.type.tensor_type.shape.dim
        shape = [dim.dim_value if dim.HasField("dim_value") else sizes[dim.dim_param] for dim in dims]
        made[value.name] = generator.standard_normal(shape).astype(np.float32)
    made |= {"lengths": np.array(use.lengths, np.int32) - 1, "total": np.array([use.total], np.int32)}
    made |= {"cosines": np.cos(angles).astype(np.float32), "sines": np.sin(angles).astype(np.float32)}
    starts = np.maximum(np.array(use.lengths) - use.new, 0)
    made["positions"] = (starts[:, None] + np.arange(use.new)).astype(np.int64)
    return {value.name: made[value.name] for value in proto.graph.input}


def agree(before: Any, after: Any, use: Use) -> None:
    """Outputs of rows that are no padding, and rows of the caches that are valid."""
    feeds = arrays(before, use)
    want, got = by_onnxruntime(before, feeds), by_onnxruntime(after, feeds)
    for expected, actual in zip(want, got, strict=True):
        assert expected.shape == actual.shape
        for entry, length in enumerate(use.lengths):
            valid = slice(0, min(length, use.new)) if actual.ndim == 3 else (slice(None), slice(0, length))
            np.testing.assert_allclose(actual[entry][valid], expected[entry][valid], rtol=2e-5, atol=2e-6)


@needs_current_ort
@pytest.mark.parametrize(
    "attributes",
    [{}, {"scale": 0.3}, {"softcap": 2.0}, {"local_window_size": 3}, {"do_rotary": 1}, {"do_rotary": 1, "rotary_interleaved": 1}],
    ids=str,
)
@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_any_use(use, attributes):
    """One form for all of them: the cache is padded to the total length, scattered into, and read up to each entry's length."""
    names = ("q", "k", "v", "past_key", "past_value", "lengths", "total")
    made = rewritten(model((*names, "cosines", "sines") if "do_rotary" in attributes else names, **attributes))
    assert made.types.count("TensorScatter") == 2
    window = attributes.get("local_window_size")
    assert made.attributes.get("left_window_size") == (None if window is None else window - 1)
    assert {entry.domain for entry in made.after.opset_import} == {""}
    agree(made.before, made.after, use)


@needs_current_ort
@pytest.mark.parametrize("name", ["prompt", "padded prompt", "decode, cache grows", "some rows behind a past"])
def test_unpadded_is_one_node(name):
    """If the caller vouches that entries are full, Attention concatenates past and new rows itself."""
    made = rewritten(model(), unpadded=True)
    assert made.types == ["Attention"] and list(made.attention.input)[-2:] == ["past_key", "past_value"]
    agree(made.before, made.after, USES[name])


@needs_current_ort
def test_unpadded_is_wrong_where_entries_are_padded():
    """Why it takes somebody's word: the short entry would see rows that are not its own."""
    made = rewritten(model(), unpadded=True)
    with pytest.raises(AssertionError):
        agree(made.before, made.after, USES["decode, entries of other lengths"])


@needs_current_ort
@pytest.mark.parametrize("name", ["prompt", "padded prompt"])
def test_without_a_past(name):
    made = rewritten(model(("q", "k", "v", "", "", "lengths", "total")))
    assert made.types == ["Attention"]
    agree(made.before, made.after, USES[name])


@needs_current_ort
@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_packed_with_given_positions(use):
    made = rewritten(model(("q", "", "", "past_key", "past_value", "lengths", "total", "cosines", "sines", "positions"), do_rotary=1))
    assert "Split" in made.types
    agree(made.before, made.after, use)


@needs_current_ort
@pytest.mark.parametrize("unpadded", [False, True])
@pytest.mark.parametrize("form", ["rotary", "window", "behind ONNX Runtime's own operator"])
def test_a_file(form, unpadded, tmp_path):
    """The check makes up lengths that fit: one row, some rows behind a past, and a prompt."""
    names = ("q", "k", "v", "past_key", "past_value", "lengths", "total")
    proto = model(
        (*names, "cosines", "sines") if form == "rotary" else names,
        **{"rotary": {"do_rotary": 1}, "window": {"local_window_size": 3}}.get(form, {}),
    )
    if form == "behind ONNX Runtime's own operator":  # in ONNX's domain, but onnx does not know it
        norm = onnx.helper.make_node("SimplifiedLayerNormalization", ["q", "gamma"], ["normal"], axis=-1, epsilon=1e-5)
        proto.graph.node.insert(0, norm)
        proto.graph.node[1].input[0] = "normal"
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(HEADS * SIZE, np.float32), "gamma"))
    onnx.save(proto, tmp_path / "in.onnx")
    report = rewrite_file(tmp_path / "in.onnx", tmp_path / "out.onnx", unpadded=unpadded)
    assert report.is_written and len(report.checked) == 3
    assert {entry.version for entry in onnx.load(tmp_path / "out.onnx").opset_import} == {report.opset_after}
    assert report.opset_after == (25 if form == "window" else 23 if unpadded else 24)


def test_layers_share_what_lengths_say():
    """Two layers: positions, starts and paddings are computed once."""
    proto = model()
    second = onnx.NodeProto()
    second.CopyFrom(proto.graph.node[0])
    second.name, second.input[0] = "second", "y"
    second.output[:] = ["y2", "present_key_2", "present_value_2"]
    proto.graph.node.append(second)
    for name, old in (("y2", 0), ("present_key_2", 1), ("present_value_2", 2)):
        output = proto.graph.output.add()
        output.CopyFrom(proto.graph.output[old])
        output.name = name
    one, two = rewritten(model()), rewritten(proto)
    assert two.types.count("Attention") == 2
    assert two.types.count("Max") == one.types.count("Max") and two.types.count("Sub") == one.types.count("Sub")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"smooth_softmax": 1}, "smooth_softmax=1, for which Attention has no equal"),
        ({"k_quant_type": "PER_TENSOR"}, "its cache is quantised"),
        ({"kv_cache_bit_width": 8}, "kv_cache_bit_width=8"),
        ({"qk_output": 1}, "qk_output=1"),
        ({"do_rotary": 1}, "do_rotary=1 without cos_cache and sin_cache"),
        ({"names": ("q", "k", "v", "past_key", "past_value", "lengths", "total", "", "", "", "bias")}, "it has attention_bias"),
        ({"names": ("q", "k", "v", "past_key", "past_value", "lengths", "total", "", "", "", "", "sink")}, "it has head_sink"),
        ({"names": ("q", "k", "v", "past_key", "", "lengths", "total")}, "it has half a past"),
    ],
)
def test_refused(options, reason):
    report = rewrite(onnx_ir.from_proto(model(**options)))
    assert not report.replaced and report.opset_after == 21
    assert [(left.name, left.op_type) for left in report.left] == [("layer", "GroupQueryAttention")]
    assert reason in report.left[0].reason


def test_a_buffer_is_not_unpadded():
    proto = model()
    for output in proto.graph.output[1:]:
        output.type.tensor_type.shape.dim[2].dim_param = "past"
    report = rewrite(onnx_ir.from_proto(proto), unpadded=True)
    assert "it is a buffer with room and not concatenated" in report.left[0].reason
