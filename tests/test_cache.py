"""Caches: TensorScatter pure and in place, attention over a cache that it appends to, past and present, lengths read off a mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import (
    FLOAT_DTYPES,
    HALF_DTYPES,
    INF,
    NAN,
    Case,
    Source,
    assert_close,
    assert_same_bits,
    call_attention,
    check_attention,
    compare_attention,
    loose,
    make_inputs,
    poison_memory,
    poison_past,
    ragged_lengths,
)
from torch import Tensor

from torch_onnx_attn import reference

ops = torch.ops.onnx_attn

# ---------------------------------------------------------------------------------------------------------------------
# tensor_scatter, tensor_scatter_

SCATTER_DTYPES = [
    *FLOAT_DTYPES,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def check_scatter(cache: Tensor, update: Tensor, indices: list[int] | None, **attributes: Any) -> None:
    """The pure op, and the one in place, against the reference, bit for bit."""
    write_indices = None if indices is None else torch.tensor(indices, dtype=torch.int64, device=cache.device)
    expected = reference.tensor_scatter(cache, update, write_indices, **attributes)
    before = cache.clone()
    poison_memory(cache.device, [cache] if cache.is_floating_point() else [])
    present = ops.tensor_scatter(cache, update, write_indices, **attributes)
    assert_same_bits("cache left alone", as_bytes(cache), as_bytes(before))
    assert present.is_contiguous()
    assert present.numel() == 0 or present.untyped_storage().data_ptr() != cache.untyped_storage().data_ptr()
    assert_same_bits("present", as_bytes(present), as_bytes(expected))
    assert ops.tensor_scatter_(cache, update, write_indices, **attributes) is None
    assert_same_bits("cache", as_bytes(cache), as_bytes(expected))


def as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8)


def numbers(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(shape).mul(20).to(dtype).to(device)


@pytest.mark.parametrize("dtype", SCATTER_DTYPES, ids=str)
@pytest.mark.parametrize("circular", [False, True])
def test_scatter_types(dtype: torch.dtype, circular: bool, device: str) -> None:
    cache, update = numbers((3, 2, 7, 5), dtype, device), numbers((3, 2, 3, 5), dtype, device)
    check_scatter(cache, update, [0, 4, 2], circular=circular)


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((3, 7), 1),
        ((3, 7), -1),
        ((3, 7, 5), -2),
        ((3, 5, 7), -1),
        ((3, 2, 7, 5), 2),
        ((3, 7, 2, 5), 1),
        ((3, 2, 7, 5), -3),
        ((3, 2, 2, 7, 5), 3),
    ],
)
@pytest.mark.parametrize("circular", [False, True])
def test_scatter_axes(shape: tuple[int, ...], axis: int, circular: bool, device: str) -> None:
    rows = list(shape)
    rows[axis] = 1 if rows[axis] == 2 else 3
    first = min(4, shape[axis] - rows[axis])
    check_scatter(
        numbers(shape, torch.float32, device), numbers(tuple(rows), torch.float32, device), [0, first, 1], axis=axis, circular=circular
    )


def test_scatter_wraps_around(device: str) -> None:
    """Positions are modulo the capacity, indices beyond it too."""
    cache, update = numbers((5, 2, 4, 3), torch.float16, device), numbers((5, 2, 3, 3), torch.float16, device)
    check_scatter(cache, update, [2, 3, 4, 7, 4000000003], circular=True)


def test_scatter_without_indices_starts_at_zero(device: str) -> None:
    check_scatter(numbers((2, 3, 6, 4), torch.float32, device), numbers((2, 3, 2, 4), torch.float32, device), None)


def test_scatter_of_everything_and_of_nothing(device: str) -> None:
    for rows in (0, 6):
        check_scatter(numbers((2, 3, 6, 4), torch.float32, device), numbers((2, 3, rows, 4), torch.float32, device), [0, 0])
    check_scatter(numbers((0, 3, 6, 4), torch.float32, device), numbers((0, 3, 2, 4), torch.float32, device), [])
    check_scatter(numbers((2, 3, 6, 0), torch.float32, device), numbers((2, 3, 2, 0), torch.float32, device), [1, 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8], ids=str)
def test_scatter_strides(dtype: torch.dtype, device: str) -> None:
    """Caches and updates are read and written where they lie, and nothing around them is touched."""
    for permutation in ((0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (3, 2, 1, 0)):
        inverse = tuple(permutation.index(axis) for axis in range(4))
        storage = numbers((9, 9, 9, 9), dtype, device)
        cache = storage.permute(permutation)[1:4, 2:6, 1:8, 3:8].permute(inverse).permute(permutation)
        update = numbers((9, 9, 9, 9), dtype, device).permute(permutation)[4:7, 1:5, 2:5, 0:5]
        cache = storage.permute(permutation)[1:4, 2:6, 1:8, 3:8]
        expected_storage = storage.clone()
        expected_storage.permute(permutation)[1:4, 2:6, 1:8, 3:8].copy_(reference.tensor_scatter(cache, update, torch.tensor([0, 4, 2])))
        ops.tensor_scatter_(cache, update, torch.tensor([0, 4, 2], device=device))
        assert_same_bits("storage", as_bytes(storage), as_bytes(expected_storage))
        check_scatter(cache, update, [1, 0, 3])
    expanded = numbers((3, 1, 2, 5), dtype, device).expand(3, 4, 2, 5)
    check_scatter(numbers((3, 4, 7, 5), dtype, device), expanded, [5, 0, 1])


@pytest.mark.gpu
@pytest.mark.parametrize("in_place", [False, True])
def test_linear_rows_that_do_not_fit_are_dropped_on_the_device(in_place: bool) -> None:
    storage = torch.randn(4, 2, 10, 6, device="cuda")
    cache, update = storage[:, :, 2:8], torch.randn(4, 2, 3, 6, device="cuda")
    indices = torch.tensor([4, 6, -2, 2**40], device="cuda")
    expected = reference.tensor_scatter(cache, update, indices)
    around = storage.clone()
    if in_place:
        ops.tensor_scatter_(cache, update, indices)
        around[:, :, 2:8] = expected
        assert_same_bits("storage", storage, around)
    else:
        assert_same_bits("present", ops.tensor_scatter(cache, update, indices), expected)
        assert_same_bits("storage", storage, around)


# ---------------------------------------------------------------------------------------------------------------------
# attention_cached


def cached_inputs(case: Case, capacity: int, lengths: Tensor, device: str) -> dict[str, Tensor]:
    """Q, K and V of a case, caches whose free rows are NaN and inf, and their lengths."""
    source = Source((case, capacity), device)
    v_head_size = case.head_size if case.v_head_size is None else case.v_head_size
    key_cache = source.normal(case.batch, case.kv_heads, capacity, case.head_size, dtype=case.dtype)
    value_cache = source.normal(case.batch, case.kv_heads, capacity, v_head_size, dtype=case.v_dtype or case.dtype)
    caches = {"key_cache": poison_past(key_cache, lengths, NAN), "value_cache": poison_past(value_cache, lengths, INF)}
    if case.layout == "loose":
        caches = {name: loose(x) for name, x in caches.items()}
    inputs = make_inputs(case, device)
    return inputs | caches | {"cache_lengths": lengths.to(device)}


def check_cached(case: Case, capacity: int, lengths: Tensor, device: str) -> None:
    inputs = cached_inputs(case, capacity, lengths, device)
    expected = reference.attention_cached(**inputs, **case.attributes())
    poison_memory(device, inputs.values())
    Y = ops.attention_cached(**inputs, **case.attributes())
    for name in ("key_cache", "value_cache"):
        assert_same_bits(name, inputs[name], getattr(expected, name))
    # The caches are now as the reference left them, so that the rest is plain attention over them.
    over_cache = {
        "Q": inputs["Q"],
        "K": expected.key_cache,
        "V": expected.value_cache,
        "nonpad_kv_seqlen": inputs["cache_lengths"].long() + case.kv_len,
    }
    if "attn_mask" in inputs:
        over_cache["attn_mask"] = inputs["attn_mask"]
    attributes = case.attributes()
    if case.layout == "3d":
        over_cache["Q"] = inputs["Q"].unflatten(2, (case.q_heads, -1)).transpose(1, 2)
        Y = Y.unflatten(2, (case.q_heads, -1)).transpose(1, 2)
        attributes = {name: value for name, value in attributes.items() if not name.endswith("num_heads")}
    compare_attention(over_cache, {"Y": Y}, **attributes)
    assert torch.equal(
        expected.Y.unflatten(2, (case.q_heads, -1)).transpose(1, 2) if case.layout == "3d" else expected.Y,
        reference.attention(**over_cache, **attributes).Y,
    )


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "3d", "loose"])
@pytest.mark.parametrize("new_len", [1, 3, 64])
@pytest.mark.parametrize("is_causal", [False, True])
def test_cached(dtype: torch.dtype, layout: str, new_len: int, is_causal: bool, device: str) -> None:
    case = Case(dtype=dtype, layout=layout, batch=4, q_len=new_len, kv_len=new_len, head_size=32, v_head_size=40, is_causal=is_causal)
    check_cached(case, 200, torch.tensor([0, 1, 70, 200 - new_len]), device)


@pytest.mark.parametrize(
    "features",
    [
        {"left_window_size": 20, "is_causal": True},
        {"softcap": 3.0},
        {"scale": 0.0},
        {"mask": "bool", "mask_axes": "b1qk"},
        {"mask": "same", "mask_axes": "hqk", "mask_columns": 60},
        {"q_heads": 8, "kv_heads": 1},
        {"q_len": 5},  # more queries than new keys
        {"kv_len": 5, "is_causal": True},
        {"kv_len": 0},
        {"q_len": 0},
        {"v_dtype": torch.float64},
        {"head_size": 300},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cached_composes(features: dict[str, Any], dtype: torch.dtype, device: str) -> None:
    sizes = {"dtype": dtype, "batch": 4, "q_len": 2, "kv_len": 2}
    capacity = 90
    if "mask" in features and "mask_columns" not in features:
        features = features | {"mask_columns": capacity}
    check_cached(Case(**sizes | features), capacity, torch.tensor([0, 1, 40, 85]), device)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_cached_length_types(dtype: torch.dtype, device: str) -> None:
    lengths = torch.tensor([[3, 9], [0, 9], [7, 9]], dtype=dtype)[:, 0]
    check_cached(Case(batch=3, q_len=2, kv_len=2), 10, lengths, device)


def test_cached_step_by_step_is_causal_prefill(device: str) -> None:
    """A prompt of 5 and then tokens one by one give the rows of one causal call over all 12."""
    inputs = make_inputs(Case(q_len=12, kv_len=12, q_heads=4, kv_heads=2), device)
    whole = ops.attention(**inputs, is_causal=True)
    caches = {name: torch.full((2, 2, 16, 16), NAN, device=device) for name in ("key_cache", "value_cache")}
    lengths = torch.zeros(2, dtype=torch.int64, device=device)
    rows = []
    for start, stop in ((0, 5), *((token, token + 1) for token in range(5, 12))):
        step = {name: x[:, :, start:stop] for name, x in inputs.items()}
        rows.append(ops.attention_cached(**step, **caches, cache_lengths=lengths, is_causal=True))
        lengths += stop - start
    torch.testing.assert_close(torch.cat(rows, 2), whole, atol=5e-6, rtol=5e-6)
    assert_same_bits("key_cache", caches["key_cache"][:, :, :12], inputs["K"])
    assert bool(caches["value_cache"][:, :, 12:].isnan().all())


@pytest.mark.gpu
def test_cached_rows_that_do_not_fit_are_dropped_on_the_device() -> None:
    """Lengths at and past the capacity: nothing around the caches is written, and the valid length ends at the capacity."""
    case = Case(batch=4, q_len=3, kv_len=3)
    lengths = torch.tensor([0, 8, 10, 11])
    inputs = cached_inputs(case, 10, lengths.clamp(max=10), "cuda")
    storage = {name: torch.full((4, 2, 16, 16), 5.0, device="cuda") for name in ("key_cache", "value_cache")}
    for name, whole in storage.items():
        inputs[name] = whole[:, :, 3:13].copy_(inputs[name])
    inputs["cache_lengths"] = lengths.cuda()
    expected = reference.attention_cached(**inputs)
    Y = ops.attention_cached(**inputs)
    for name, whole in storage.items():
        assert_same_bits(name, inputs[name], getattr(expected, name))
        assert bool((whole[:, :, :3] == 5).all()) and bool((whole[:, :, 13:] == 5).all())
    over_cache = {"Q": inputs["Q"], "K": expected.key_cache, "V": expected.value_cache, "nonpad_kv_seqlen": inputs["cache_lengths"] + 3}
    compare_attention(over_cache, {"Y": Y})


# ---------------------------------------------------------------------------------------------------------------------
# past and present


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "3d", "loose"])
@pytest.mark.parametrize("past", [0, 1, 70])
def test_past(dtype: torch.dtype, layout: str, past: int, device: str) -> None:
    """Present is the past and then the new rows, to the bit."""
    check_attention(Case(dtype=dtype, layout=layout, past=past, q_len=3, kv_len=2, head_size=32, v_head_size=24), device)


def test_past_without_new_rows(device: str) -> None:
    check_attention(Case(past=9, kv_len=0, q_len=3), device)


def test_past_with_other_values(device: str) -> None:
    """past_value has V's type, which may differ from K's."""
    check_attention(Case(dtype=torch.float16, v_dtype=torch.float32, past=9, qk_matmul_output_mode=3), device)


def test_chunks_append_all_their_rows(device: str) -> None:
    inputs = make_inputs(Case(q_len=8, kv_len=8), device)
    past = {"past_key": inputs["K"][:, :, :0], "past_value": inputs["V"][:, :, :0]}
    rows = []
    for start, stop in ((0, 3), (3, 7), (7, 8)):
        Y, *present = ops.attention.kv(**{name: x[:, :, start:stop] for name, x in inputs.items()}, **past, is_causal=True)
        rows.append(Y)
        past = dict(zip(past, present, strict=True))
    torch.testing.assert_close(torch.cat(rows, 2), ops.attention(**inputs, is_causal=True), atol=5e-6, rtol=5e-6)
    assert_same_bits("present_key", past["past_key"], inputs["K"])


def test_shared_keys_for_several_calls(device: str) -> None:
    """Layers that borrow another layer's keys and values: the same storage in several calls."""
    inputs = make_inputs(Case(dtype=torch.float16, kv_len=70), device)
    first = call_attention(inputs)["Y"]
    other = call_attention(inputs | {"Q": inputs["Q"] + 1})["Y"]
    assert_same_bits("Y", call_attention(inputs)["Y"], first)
    assert not torch.equal(first, other)


# ---------------------------------------------------------------------------------------------------------------------
# valid_kv_length


def check_valid_length(mask: Tensor, expected: list[int] | None = None) -> None:
    lengths = ops.valid_kv_length(mask)
    assert lengths.dtype == torch.int64 and lengths.device == mask.device and lengths.dim() == 1
    assert lengths.tolist() == reference.valid_kv_length(mask).tolist()
    if expected is not None:
        assert lengths.tolist() == expected


def test_valid_length_is_one_past_the_last_allowed_key(device: str) -> None:
    """Of the last row; holes and left padding do not shorten it."""
    mask = torch.tensor([[[[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]], [[[0, 0, 0, 0, 0], [0, 1, 0, 1, 0]]], [[[1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]]])
    check_valid_length(mask.bool().to(device), [2, 4, 0])
    for dtype in FLOAT_DTYPES:
        bias = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask.bool(), torch.finfo(dtype).min).to(device)
        check_valid_length(bias, [2, 4, 0])


def test_valid_length_threshold(device: str) -> None:
    """A number counts as allowed above -1000, NaN and -1000 itself do not."""
    check_valid_length(torch.tensor([[[[0.0, -999.0, -1000.0]]], [[[NAN, -1001.0, -INF]]], [[[5.0, 9.0, INF]]]], device=device), [2, 0, 3])


@pytest.mark.parametrize("dtype", [torch.bool, *HALF_DTYPES, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "shape", [(9,), (1, 9), (5, 9), (4, 5, 9), (1, 5, 9), (3, 4, 5, 9), (3, 1, 1, 9), (1, 4, 5, 9), (3, 4, 5, 300), (3, 4, 5, 1)]
)
def test_valid_length_shapes(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """Right-aligned; the union over heads; one number for each batch entry of the mask."""
    keep = torch.rand(shape) < 0.2
    check_valid_length((keep if dtype == torch.bool else torch.where(keep, 0.0, -1e4).to(dtype)).to(device))


def test_valid_length_strides(device: str) -> None:
    keep = (torch.rand(6, 7, 8, 40) < 0.1).to(device)
    check_valid_length(keep[::2, 1:3, :5, 3:20])
    check_valid_length(keep[:, :, 0, :].transpose(1, 2)[:, None])
    check_valid_length(keep[:1, :1, :1].expand(3, 4, 5, 40))
    check_valid_length(keep[:, :, :, :1].expand(6, 7, 8, 9))


def test_valid_length_of_empty_masks(device: str) -> None:
    check_valid_length(torch.zeros(3, 2, 4, 0, dtype=torch.bool, device=device), [0, 0, 0])
    check_valid_length(torch.zeros(0, 2, 4, 5, dtype=torch.bool, device=device), [])


def test_valid_length_serves_as_nonpad(device: str) -> None:
    """What it is for: a padding mask turned into lengths gives the same attention."""
    inputs = make_inputs(Case(batch=5, q_len=2, kv_len=70), device)
    lengths = ragged_lengths(5, 70, 8).to(device)
    mask = (torch.arange(70, device=device) < lengths[:, None])[:, None, None]
    assert ops.valid_kv_length(mask).tolist() == lengths.tolist()
    by_length = ops.attention(**inputs, nonpad_kv_seqlen=ops.valid_kv_length(mask))
    assert_close("Y", by_length, ops.attention(**inputs, attn_mask=mask).double(), 1e-5)
