"""com.microsoft::MultiHeadAttention: layouts, the four mask forms, biases, caches shared and not, beams, causality."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import (
    INF,
    NAN,
    MhaCase,
    assert_close,
    assert_same_bits,
    call_mha,
    check_mha,
    compare_mha,
    loose,
    make_mha_inputs,
    poison_memory,
)
from torch import Tensor

from torch_onnx_attn import reference

mha = torch.ops.onnx_attn.mha

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("bsnh", "bnsh", "packed_kv", "packed_qkv")


def case_for(layout: str, **fields: Any) -> MhaCase:
    """A case whose lengths suit the layout: packed QKV has as many keys as queries."""
    sizes = {"q_len": 7, "kv_len": 7 if layout == "packed_qkv" else 33} | fields
    return MhaCase(layout=layout, **sizes)


# ---------------------------------------------------------------------------------------------------------------------
# Layouts and projection bias


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("qk", [False, True])
def test_layouts(layout: str, dtype: torch.dtype, qk: bool, device: str) -> None:
    check_mha(case_for(layout, dtype=dtype, qk=qk), device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["bsnh", "bnsh", "packed_qkv"])
@pytest.mark.parametrize("qk", [False, True])
def test_bias(layout: str, dtype: torch.dtype, qk: bool, device: str) -> None:
    """With keys that come with their heads split only the query's third acts."""
    check_mha(case_for(layout, dtype=dtype, bias=True, qk=qk), device)


@pytest.mark.parametrize("lengths", [(1, 1), (1, 300), (70, 130), (128, 128), (129, 65)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_bias_lengths(lengths: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    check_mha(MhaCase(dtype=dtype, q_len=lengths[0], kv_len=lengths[1], bias=True, head_size=64), device)


def test_bias_of_bnsh_keys_is_for_the_query_alone(device: str) -> None:
    inputs = make_mha_inputs(case_for("bnsh", bias=True), device)
    changed = inputs["bias"].clone()
    changed[32:] = NAN
    assert_same_bits("output", call_mha(inputs | {"bias": changed}, num_heads=2)["output"], call_mha(inputs, num_heads=2)["output"])


@pytest.mark.parametrize("head_size", [1, 5, 32, 37, 64, 80, 128, 200, 300])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head_sizes(head_size: int, dtype: torch.dtype, device: str) -> None:
    check_mha(MhaCase(dtype=dtype, num_heads=3, head_size=head_size, q_len=9, kv_len=66), device)


@pytest.mark.parametrize(("head_size", "v_head_size"), [(8, 12), (12, 8), (64, 96), (96, 1), (40, 300)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_value_head_size_differs(head_size: int, v_head_size: int, bias: bool, dtype: torch.dtype, device: str) -> None:
    check_mha(MhaCase(dtype=dtype, head_size=head_size, v_head_size=v_head_size, bias=bias, qk=True), device)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout: str, device: str) -> None:
    """Inputs as slices of larger storage, with a strided last axis, and packed from one projection."""
    for dtype in (torch.float32, torch.float16):
        inputs = make_mha_inputs(case_for(layout, dtype=dtype), device)
        names = [name for name in ("query", "key", "value") if name in inputs]
        compare_mha(
            {name: slice_of_more(inputs[name]) for name in names},
            call_mha({name: slice_of_more(inputs[name]) for name in names}, num_heads=2),
            num_heads=2,
        )
        strided = {name: torch.stack([inputs[name], inputs[name] + 1], -1)[..., 0] for name in names}
        compare_mha(strided, call_mha(strided, num_heads=2), num_heads=2)


def slice_of_more(x: Tensor) -> Tensor:
    return loose(x) if x.dim() <= 4 else torch.cat([x.new_full((*x.shape[:-1], 3), NAN), x], -1)[..., 3:]


def test_strided_masks_and_biases(device: str) -> None:
    inputs = make_mha_inputs(MhaCase(bias=True, mask="rows", attention_bias="bh"), device)
    for name in ("bias", "key_padding_mask", "attention_bias"):
        strided = inputs | {name: torch.stack([inputs[name], inputs[name]], -1)[..., 0]}
        compare_mha(strided, call_mha(strided, num_heads=2), num_heads=2)
    transposed = inputs | {
        name: inputs[name].transpose(-1, -2).contiguous().transpose(-1, -2) for name in ("key_padding_mask", "attention_bias")
    }
    compare_mha(transposed, call_mha(transposed, num_heads=2), num_heads=2)
    expanded = inputs | {
        "key_padding_mask": inputs["key_padding_mask"][:, :1].expand(2, 5, 9),
        "attention_bias": inputs["attention_bias"][:1].expand(2, 2, 5, 9),
    }
    compare_mha(expanded, call_mha(expanded, num_heads=2), num_heads=2)


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"q_len": 0}, {"kv_len": 0}, {"kv_len": 0, "past": 5}, {"kv_len": 0, "past": 0}], ids=str)
@pytest.mark.parametrize("unidirectional", [False, True])
def test_empty(sizes: dict[str, int], unidirectional: bool, device: str) -> None:
    """No keys at all: zeros. No new keys: the past alone. No queries: the present is still written."""
    check_mha(MhaCase(unidirectional=unidirectional, **sizes), device)
    check_mha(MhaCase(unidirectional=unidirectional, qk=True, **sizes), device)


# ---------------------------------------------------------------------------------------------------------------------
# Scale and masks


@pytest.mark.parametrize("scale", [0.0, -0.0, 0.3, -0.25, 1.0])
def test_scale(scale: float, device: str) -> None:
    """0 means 1 / sqrt(head_size), minus 0 too; every other number is itself."""
    check_mha(MhaCase(scale=scale, qk=True, attention_bias="h"), device)


FORMS = ("lengths", "lengths_starts", "keys", "rows")
FILTERS = (-10000.0, -0.75, 0.0, 2.0, -1e30, torch.finfo(torch.float32).min, -INF)


MASK_DTYPES = (torch.int32, torch.int64, torch.bool)


@pytest.mark.parametrize(
    ("mask", "mask_dtype"), [(m, d) for m in FORMS for d in MASK_DTYPES if d != torch.bool or not m.startswith("lengths")], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masks(mask: str, mask_dtype: torch.dtype, dtype: torch.dtype, device: str) -> None:
    """The numbers include negative ones, counts beyond the keys, and an entry of which everything is masked."""
    check_mha(MhaCase(dtype=dtype, batch=3, mask=mask, mask_dtype=mask_dtype, kv_len=70, qk=mask == "keys"), device)
    check_mha(MhaCase(dtype=dtype, batch=3, mask=mask, mask_dtype=mask_dtype, kv_len=3, q_len=3, past=40, unidirectional=True), device)


@pytest.mark.parametrize("mask_filter_value", FILTERS)
@pytest.mark.parametrize("mask", FORMS)
@pytest.mark.parametrize("unidirectional", [False, True])
@pytest.mark.parametrize("kv_len", [6, 130])
def test_filters(mask_filter_value: float, mask: str, unidirectional: bool, kv_len: int, device: str) -> None:
    """Added, whatever it is: small filters leave weight, positive ones give it, the lowest swallow the scores, -inf excludes."""
    case = MhaCase(batch=3, q_len=6, kv_len=kv_len, mask=mask, mask_filter_value=mask_filter_value, unidirectional=unidirectional)
    check_mha(case, device)
    check_mha(MhaCase(**vars(case) | {"qk": True, "dtype": torch.float16}), device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_everything_masked_is_the_raw_softmax(dtype: torch.dtype, device: str) -> None:
    """The default filter cancels. In half precision logits its step of 8 would flatten the row: they stay float32."""
    inputs = make_mha_inputs(MhaCase(dtype=dtype, kv_len=8), device)
    mask = torch.zeros(2, 8, dtype=torch.int32, device=device)
    masked, plain = (call_mha(inputs | extra, num_heads=2)["output"] for extra in ({"key_padding_mask": mask}, {}))
    assert_close("output", masked, plain.double(), 4e-3 if dtype == torch.float32 else 2e-2)
    mean = inputs["value"].mean(1, keepdim=True)
    assert float((masked - mean).abs().max()) > 0.1


def test_infinite_filter_makes_masked_rows_zero(device: str) -> None:
    inputs = make_mha_inputs(MhaCase(), device)
    mask = torch.tensor([[0] * 9, [1] * 9], device=device)
    output = call_mha(inputs | {"key_padding_mask": mask}, num_heads=2, mask_filter_value=-INF)["output"]
    assert bool((output[0] == 0).all()) and bool((output[1] != 0).all())


@pytest.mark.parametrize("axes", ["", "b", "h", "bh"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_len", [9, 77])
def test_attention_bias(axes: str, dtype: torch.dtype, kv_len: int, device: str) -> None:
    check_mha(MhaCase(dtype=dtype, batch=3, num_heads=4, kv_len=kv_len, attention_bias=axes, qk=True), device)
    check_mha(MhaCase(dtype=dtype, batch=3, num_heads=4, kv_len=kv_len, attention_bias=axes, mask="keys", scale=0.4), device)


def test_infinite_attention_bias(device: str) -> None:
    """-inf excludes exactly; a row of nothing else is zero."""
    inputs = make_mha_inputs(MhaCase(attention_bias=""), device)
    inputs["attention_bias"][:, :, :, 3] = -INF
    inputs["attention_bias"][:, :, 1] = -INF
    actual = call_mha(inputs, True, num_heads=2)
    compare_mha(inputs, actual, num_heads=2)
    assert bool((actual["output"][:, 1] == 0).all())


# ---------------------------------------------------------------------------------------------------------------------
# unidirectional: query s sees key t <= T - S + s


@pytest.mark.parametrize(
    ("q_len", "kv_len", "past"),
    [(5, 5, None), (2, 5, None), (2, 4, 3), (4, 2, None), (1, 7, None), (3, 3, 4), (130, 130, None), (65, 130, 20)],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("qk", [False, True])
def test_unidirectional(q_len: int, kv_len: int, past: int | None, dtype: torch.dtype, qk: bool, device: str) -> None:
    check_mha(MhaCase(dtype=dtype, q_len=q_len, kv_len=kv_len, past=past, unidirectional=True, qk=qk), device)


@pytest.mark.parametrize(
    ("q_len", "kv_len", "picture"),
    [(3, 3, ["#..", "##.", "###"]), (2, 5, ["####.", "#####"]), (4, 2, ["..", "..", "#.", "##"]), (1, 4, ["####"])],
)
def test_unidirectional_counts_from_the_bottom_right(q_len: int, kv_len: int, picture: list[str], device: str) -> None:
    query, key = torch.zeros(1, q_len, kv_len, device=device), torch.zeros(1, kv_len, kv_len, device=device)
    output = mha(query, key, torch.eye(kv_len, device=device)[None], num_heads=1, unidirectional=True)
    assert ["".join("#" if weight else "." for weight in row) for row in output[0].tolist()] == picture


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unidirectional_layouts(layout: str, device: str) -> None:
    check_mha(case_for(layout, unidirectional=True, q_len=9, kv_len=9), device)


def test_unidirectional_excludes_where_padding_adds(device: str) -> None:
    """Left padding: row 0 sees key 0 alone, padded as it is, and so becomes V[0]."""
    inputs = make_mha_inputs(MhaCase(q_len=3, kv_len=3), device)
    mask = torch.tensor([[0, 1, 1], [0, 0, 1]], dtype=torch.int32, device=device)
    output = call_mha(inputs | {"key_padding_mask": mask}, num_heads=2, unidirectional=True)["output"]
    torch.testing.assert_close(output[:, 0], inputs["value"][:, 0])
    torch.testing.assert_close(output[0, 1], inputs["value"][0, 1])


def test_qk_of_a_forbidden_key_is_the_lowest_float32(device: str) -> None:
    """As ONNX Runtime shows it; in float16 that is -inf. The weight is 0 whatever qk shows."""
    inputs = make_mha_inputs(MhaCase(q_len=2, kv_len=2), device)
    qk = call_mha(inputs, True, num_heads=2, unidirectional=True)["qk"]
    assert bool((qk[:, :, 0, 1] == torch.finfo(torch.float32).min).all())
    half = {name: x.half() for name, x in inputs.items()}
    assert bool((call_mha(half, True, num_heads=2, unidirectional=True)["qk"][:, :, 0, 1] == -INF).all())


# ---------------------------------------------------------------------------------------------------------------------
# past and present


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("past", [0, 1, 64, 130])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("qk", [False, True])
def test_past(dtype: torch.dtype, past: int, bias: bool, qk: bool, device: str) -> None:
    """The bias goes to the new rows only, and present holds the sum."""
    check_mha(MhaCase(dtype=dtype, q_len=3, kv_len=4, past=past, bias=bias, qk=qk, head_size=32), device)


def test_past_with_bnsh_keys(device: str) -> None:
    check_mha(MhaCase(layout="bnsh", past=9, bias=True, unidirectional=True, mask="keys"), device)


def test_past_as_a_slice(device: str) -> None:
    inputs = make_mha_inputs(MhaCase(past=9), device)
    inputs |= {name: loose(inputs[name]) for name in ("past_key", "past_value")}
    compare_mha(inputs, call_mha(inputs, num_heads=2), num_heads=2)


# ---------------------------------------------------------------------------------------------------------------------
# Shared buffers: the Case keeps NaN and inf in the free rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("past", "kv_len", "capacity"), [(0, 5, 8), (3, 3, 16), (5, 1, 6), (100, 1, 300), (70, 64, 200)])
def test_shared(dtype: torch.dtype, bias: bool, past: int, kv_len: int, capacity: int, device: str) -> None:
    case = MhaCase(dtype=dtype, batch=3, q_len=kv_len, kv_len=kv_len, past=past, capacity=capacity, bias=bias, head_size=32)
    check_mha(case, device)
    check_mha(MhaCase(**vars(case) | {"unidirectional": True, "mask": "keys", "attention_bias": "h"}), device)


@pytest.mark.parametrize("mask", FORMS)
def test_shared_masks(mask: str, device: str) -> None:
    """Masks are as wide as the keys in use, or as the whole buffer."""
    case = MhaCase(batch=3, q_len=2, kv_len=2, past=5, capacity=12, mask=mask, attention_bias="bh")
    check_mha(case, device)
    inputs = make_mha_inputs(case, device)
    wide = dict(inputs)
    wide["attention_bias"] = torch.cat([inputs["attention_bias"], torch.full((3, 2, 2, 5), NAN, device=device)], -1)
    if mask in ("keys", "rows"):
        wide["key_padding_mask"] = torch.nn.functional.pad(inputs["key_padding_mask"], (0, 5), value=1)
    compare_mha(wide, call_mha(wide, num_heads=2), num_heads=2)


@pytest.mark.gpu
def test_narrow_masks_of_shared_buffers_on_the_device() -> None:
    """The host does not know the keys in use there: columns that a mask lacks count as masked."""
    inputs = make_mha_inputs(MhaCase(batch=3, q_len=2, kv_len=2, past=5, capacity=12, mask="keys", attention_bias="bh"), "cuda")
    inputs["key_padding_mask"] = inputs["key_padding_mask"][:, :6]
    compare_mha(inputs, call_mha(inputs, num_heads=2), num_heads=2)
    inputs["attention_bias"] = inputs["attention_bias"][..., :4]
    compare_mha(inputs, call_mha(inputs, num_heads=2), num_heads=2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_shared_length_forms(dtype: torch.dtype, shape: tuple[int, ...], device: str) -> None:
    inputs = make_mha_inputs(MhaCase(past=3, capacity=12, q_len=1, kv_len=1), device)
    inputs["past_sequence_length"] = torch.full(shape, 3, dtype=dtype, device=device)
    compare_mha(inputs, call_mha(inputs, num_heads=2), num_heads=2)


def test_shared_writes_the_new_rows_and_nothing_else(device: str) -> None:
    inputs = make_mha_inputs(MhaCase(batch=3, q_len=2, kv_len=2, past=5, capacity=12), device)
    storage = torch.full((2, 3, 2, 20, 24), 7.0, device=device)
    caches = {name: part[:, :, 4:16, 3:19].copy_(inputs[name]) for name, part in zip(("past_key", "past_value"), storage, strict=True)}
    expected = storage.clone()
    for part, name in ((0, "key"), (1, "value")):
        expected[part, :, :, 9:11, 3:19] = inputs[name].unflatten(2, (2, 16)).transpose(1, 2)
    mha.shared(**inputs | caches, num_heads=2)
    assert_same_bits("storage", storage, expected)


@pytest.mark.gpu
def test_shared_rows_that_do_not_fit_are_dropped_on_the_device() -> None:
    storage = torch.randn(2, 2, 2, 20, 16, device="cuda")
    before = storage.clone()
    caches = dict(zip(("past_key", "past_value"), storage[:, :, :, 4:12], strict=True))
    inputs = make_mha_inputs(MhaCase(q_len=3, kv_len=3), "cuda")
    for past in (6, 8, 100, -1):
        output = mha.shared(**inputs, **caches, past_sequence_length=torch.tensor([past], device="cuda"), num_heads=2)
        assert bool(output.isfinite().all())
    outside = [slice(0, 4), slice(12, 20)]
    for rows in outside:
        assert_same_bits("storage", storage[:, :, :, rows], before[:, :, :, rows])


def test_shared_with_bnsh_keys(device: str) -> None:
    check_mha(MhaCase(layout="bnsh", past=5, capacity=12, q_len=2, kv_len=2, bias=True, unidirectional=True), device)


def test_shared_step_by_step(device: str) -> None:
    """A prompt of 4 and then single tokens give the rows of one causal call over all 9."""
    inputs = make_mha_inputs(MhaCase(q_len=9, kv_len=9), device)
    whole = mha(**inputs, num_heads=2, unidirectional=True)
    caches = {name: torch.full((2, 2, 16, 16), NAN, device=device) for name in ("past_key", "past_value")}
    rows = []
    for start, stop in ((0, 4), *((token, token + 1) for token in range(4, 9))):
        step = {name: x[:, start:stop] for name, x in inputs.items()}
        length = torch.tensor([start], dtype=torch.int32, device=device)
        rows.append(mha.shared(**step, **caches, past_sequence_length=length, num_heads=2, unidirectional=True))
    torch.testing.assert_close(torch.cat(rows, 1), whole, atol=5e-6, rtol=5e-6)


# ---------------------------------------------------------------------------------------------------------------------
# Beams


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("beams", [1, 2, 4])
@pytest.mark.parametrize("past", [0, 5, 130])
@pytest.mark.parametrize("features", [{}, {"bias": True}, {"mask": "keys"}, {"attention_bias": "bh"}, {"unidirectional": True}], ids=str)
def test_beams(dtype: torch.dtype, beams: int, past: int, features: dict[str, Any], device: str) -> None:
    """Past rows come from the beam that cache_indirection names; the buffers keep each entry's own rows."""
    check_mha(MhaCase(dtype=dtype, batch=8, q_len=1, kv_len=1, past=past, capacity=past + 6, beams=beams, head_size=32, **features), device)


@pytest.mark.parametrize("features", [{"q_len": 2, "kv_len": 2}, {"mask": "lengths"}, {"mask": "rows"}, {"layout": "bnsh"}], ids=str)
def test_where_beams_do_not_act(features: dict[str, Any], device: str) -> None:
    """On prompts, with other masks and with split keys the indirection is ignored, as ONNX Runtime ignores it."""
    case = MhaCase(**{"batch": 4, "q_len": 1, "kv_len": 1, "past": 5, "capacity": 9, "beams": 2} | features)
    check_mha(case, device)
    inputs = make_mha_inputs(case, device)
    direct = {name: x for name, x in inputs.items() if name != "cache_indirection"}
    assert_same_bits("output", call_mha(inputs, num_heads=2)["output"], call_mha(direct, num_heads=2)["output"])


def test_beams_do_act(device: str) -> None:
    case = MhaCase(batch=4, q_len=1, kv_len=1, past=5, capacity=9, beams=2)
    inputs = make_mha_inputs(case, device)
    direct = {name: x for name, x in inputs.items() if name != "cache_indirection"}
    assert not torch.equal(call_mha(inputs, num_heads=2)["output"], call_mha(direct, num_heads=2)["output"])


def test_beam_index_types_and_unused_entries(device: str) -> None:
    """int64 will do; entries past the filled rows may be anything."""
    case = MhaCase(batch=4, q_len=1, kv_len=1, past=5, capacity=9, beams=2)
    inputs = make_mha_inputs(case, device)
    expected = call_mha(inputs, num_heads=2)["output"]
    inputs["cache_indirection"][:, :, 5:] = 12345
    assert_same_bits("output", call_mha(inputs, num_heads=2)["output"], expected)
    inputs["cache_indirection"] = inputs["cache_indirection"].long()
    assert_same_bits("output", call_mha(inputs, num_heads=2)["output"], expected)


# ---------------------------------------------------------------------------------------------------------------------
# The rest


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_everything_at_once(dtype: torch.dtype, device: str) -> None:
    for qk in (False, True):
        check_mha(
            MhaCase(
                dtype=dtype,
                batch=3,
                num_heads=4,
                q_len=5,
                kv_len=6,
                past=70,
                bias=True,
                mask="rows",
                attention_bias="bh",
                unidirectional=True,
                scale=0.4,
                qk=qk,
            ),
            device,
        )


def test_outputs_are_new_tensors(device: str) -> None:
    inputs = make_mha_inputs(MhaCase(past=0, q_len=1, kv_len=1), device)
    poison_memory(device, inputs.values())
    for output in mha.kv(**inputs, num_heads=2):
        assert all(output.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() for x in inputs.values() if x.numel())
        assert output.is_contiguous()


def test_agrees_with_attention(device: str) -> None:
    """The two operators meet where neither's peculiarities act."""
    inputs = make_mha_inputs(MhaCase(dtype=torch.float32, q_len=20, kv_len=70, head_size=64), device)
    Y = torch.ops.onnx_attn.attention(inputs["query"], inputs["key"], inputs["value"], q_num_heads=2, kv_num_heads=2)
    torch.testing.assert_close(mha(**inputs, num_heads=2), Y, atol=5e-6, rtol=5e-6)
    assert_close("reference", reference.mha(**inputs, num_heads=2).output, Y.double(), 2e-5)
