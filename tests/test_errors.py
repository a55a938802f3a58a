"""Every illegal call is refused, in a message that names the argument, what was given, and what is allowed: attention and caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusals import Refusal, cast, check, reshaped, zeros

import torch_onnx_attn

ops = torch.ops.onnx_attn
NAN, INF = float("nan"), float("inf")


# ---------------------------------------------------------------------------------------------------------------------
# attention: 2 entries, 4 query heads on 2 key heads, 3 queries, 5 keys, head size 8


def four_dimensional() -> dict[str, Any]:
    return {"Q": zeros(2, 4, 3, 8), "K": zeros(2, 2, 5, 8), "V": zeros(2, 2, 5, 8)}


def three_dimensional() -> dict[str, Any]:
    return {"Q": zeros(2, 3, 32), "K": zeros(2, 5, 16), "V": zeros(2, 5, 16), "q_num_heads": 4, "kv_num_heads": 2}


INPUTS = [
    Refusal("int Q", {"Q": cast(torch.int32)}, "Q", ("int32", "float16")),
    Refusal("complex Q", {"Q": cast(torch.complex64)}, "Q", ("complex64", "float16")),
    Refusal("complex K", {"K": cast(torch.complex64)}, "K", ("complex64",)),
    Refusal("complex V", {"V": cast(torch.complex128)}, "V", ("complex128",)),
    Refusal("bool V", {"V": cast(torch.bool)}, "V", ("bool",)),
    Refusal("float8 V", {"V": cast(torch.float8_e4m3fn)}, "V", ("dtype",)),
    Refusal("K of another type", {"K": cast(torch.float16)}, "K", ("float16", "Q", "float32")),
    Refusal("rank 2", {"Q": reshaped(3, 8)}, "Q", ("[3, 8]", "4-D")),
    Refusal("rank 5", {"Q": reshaped(1, 2, 4, 3, 8)}, "Q", ("[1, 2, 4, 3, 8]",)),
    Refusal("K of another rank", {"K": reshaped(2, 5, 16)}, "K", ("[2, 5, 16]", "4-D")),
    Refusal("V of another rank", {"V": reshaped(2, 5, 16)}, "V", ("[2, 5, 16]", "4-D")),
    Refusal("K of another batch", {"K": reshaped(3, 2, 5, 8)}, "K", ("3", "Q", "2")),
    Refusal("V of another batch", {"V": reshaped(1, 2, 5, 8)}, "V", ("1", "Q", "2")),
    Refusal("K of another head size", {"K": reshaped(2, 2, 5, 9)}, "K", ("9", "Q", "8")),
    Refusal("V of another length", {"V": reshaped(2, 2, 6, 8)}, "V", ("6", "K", "5")),
    Refusal("V of other heads", {"V": reshaped(2, 1, 5, 8)}, "V", ("1", "K", "2")),
    Refusal("heads that do not divide", {"K": reshaped(2, 3, 5, 8), "V": reshaped(2, 3, 5, 8)}, "Q", ("4 heads", "multiple", "3")),
    Refusal("more key heads than query heads", {"K": reshaped(2, 8, 5, 8), "V": reshaped(2, 8, 5, 8)}, "Q", ("4 heads", "8")),
    Refusal("no key heads", {"K": reshaped(2, 0, 5, 8), "V": reshaped(2, 0, 5, 8)}, "Q", ("4 heads", "0")),
    Refusal("head size 0", {"Q": reshaped(2, 4, 3, 0), "K": reshaped(2, 2, 5, 0)}, "Q", ("head size 0",)),
    Refusal("v_head_size 0", {"V": reshaped(2, 2, 5, 0)}, "V", ("head size 0",)),
    Refusal("q_num_heads contradicts", {"q_num_heads": 3}, "q_num_heads", ("3", "[2, 4, 3, 8]", "4")),
    Refusal("kv_num_heads contradicts", {"kv_num_heads": 4}, "kv_num_heads", ("4", "[2, 2, 5, 8]", "2")),
    Refusal("negative q_num_heads", {"q_num_heads": -4}, "q_num_heads", ("-4",)),
    Refusal("negative kv_num_heads", {"kv_num_heads": -2}, "kv_num_heads", ("-2",)),
]

INPUTS_3D = [
    Refusal("no q_num_heads", {"q_num_heads": None}, "q_num_heads", ("0", "3-D", "[2, 3, 32]")),
    Refusal("no kv_num_heads", {"kv_num_heads": None}, "kv_num_heads", ("0", "3-D", "[2, 5, 16]")),
    Refusal("Q is no multiple", {"q_num_heads": 5}, "Q", ("32", "multiple", "q_num_heads", "5")),
    Refusal("K is no multiple", {"K": reshaped(2, 5, 17)}, "K", ("17", "multiple", "kv_num_heads", "2")),
    Refusal("V is no multiple", {"V": reshaped(2, 5, 15)}, "V", ("15", "multiple", "kv_num_heads", "2")),
    Refusal("head sizes differ", {"K": reshaped(2, 5, 18)}, "K", ("head size 9", "Q", "8")),
    Refusal("lengths differ", {"V": reshaped(2, 6, 16)}, "V", ("6", "K", "5")),
    Refusal(
        "heads do not divide",
        {"q_num_heads": 4, "kv_num_heads": 3, "K": reshaped(2, 5, 24), "V": reshaped(2, 5, 24)},
        "Q",
        ("4 heads", "3"),
    ),
    Refusal("head size 0", {"Q": reshaped(2, 3, 0), "K": reshaped(2, 5, 0)}, "Q", ("head size 0",)),
]

ATTRIBUTES = [
    Refusal("negative scale", {"scale": -0.5}, "scale", ("-0.5", ">= 0")),
    Refusal("NaN scale", {"scale": NAN}, "scale", ("nan",)),
    Refusal("infinite scale", {"scale": INF}, "scale", ("inf",)),
    Refusal("negative softcap", {"softcap": -1.0}, "softcap", ("-1", ">= 0")),
    Refusal("NaN softcap", {"softcap": NAN}, "softcap", ("nan",)),
    Refusal("infinite softcap", {"softcap": INF}, "softcap", ("inf",)),
    *(
        Refusal(f"softmax_precision {p}", {"softmax_precision": p}, "softmax_precision", (str(p), "1", "10", "11", "16"))
        for p in (0, 2, 7, -1, 17)
    ),
    Refusal("left window", {"left_window_size": -2}, "left_window_size", ("-2", "-1")),
    Refusal("right window", {"right_window_size": -3}, "right_window_size", ("-3", "-1")),
]

MASKS = [
    Refusal("longer than the keys", {"attn_mask": zeros(3, 6)}, "attn_mask", ("6", "5 keys")),
    Refusal("queries do not broadcast", {"attn_mask": zeros(2, 5)}, "attn_mask", ("[2, 5]", "2", "3 queries")),
    Refusal("heads do not broadcast", {"attn_mask": zeros(2, 3, 5)}, "attn_mask", ("[2, 3, 5]", "2", "4 query heads")),
    Refusal("entries do not broadcast", {"attn_mask": zeros(3, 1, 3, 5)}, "attn_mask", ("[3, 1, 3, 5]", "3", "2 batch entries")),
    Refusal("rank 0", {"attn_mask": torch.tensor(0.0)}, "attn_mask", ("rank 0", "1 to 4")),
    Refusal("rank 5", {"attn_mask": zeros(1, 2, 4, 3, 5)}, "attn_mask", ("rank 5", "1 to 4")),
    Refusal("complex", {"attn_mask": zeros(3, 5, dtype=torch.complex64)}, "attn_mask", ("complex64", "bool")),
]

LENGTHS = [
    Refusal("int32", {"nonpad_kv_seqlen": torch.tensor([1, 2], dtype=torch.int32)}, "nonpad_kv_seqlen", ("int32", "int64")),
    Refusal("float", {"nonpad_kv_seqlen": zeros(2)}, "nonpad_kv_seqlen", ("float32", "int64")),
    Refusal("wrong batch", {"nonpad_kv_seqlen": torch.tensor([1, 2, 3])}, "nonpad_kv_seqlen", ("[3]", "[2]")),
    Refusal("rank 2", {"nonpad_kv_seqlen": torch.tensor([[1], [2]])}, "nonpad_kv_seqlen", ("[2, 1]", "[2]")),
    Refusal("scalar", {"nonpad_kv_seqlen": torch.tensor(3)}, "nonpad_kv_seqlen", ("[]", "[2]")),
    Refusal("beyond the keys", {"nonpad_kv_seqlen": torch.tensor([5, 6])}, "nonpad_kv_seqlen", ("1", "6", "5")),
    Refusal("negative", {"nonpad_kv_seqlen": torch.tensor([-1, 2])}, "nonpad_kv_seqlen", ("0", "-1", "5")),
]

PAST = [
    Refusal("half a cache", {"past_value": None}, "past_value", ("missing", "past_key")),
    Refusal("with lengths", {"nonpad_kv_seqlen": torch.tensor([1, 2])}, "nonpad_kv_seqlen", ("past_key",)),
    Refusal("key of another type", {"past_key": cast(torch.float64)}, "past_key", ("float64", "float32")),
    Refusal("value of another type", {"past_value": cast(torch.float16)}, "past_value", ("float16", "V", "float32")),
    Refusal("rank 3", {"past_key": reshaped(2, 7, 16)}, "past_key", ("[2, 7, 16]", "past_len, head_size]")),
    Refusal("another batch", {"past_key": reshaped(1, 2, 7, 8)}, "past_key", ("[1, 2, 7, 8]", "2, 2")),
    Refusal("query heads", {"past_key": reshaped(2, 4, 7, 8)}, "past_key", ("[2, 4, 7, 8]", "2, 2")),
    Refusal("another head size", {"past_key": reshaped(2, 2, 7, 9)}, "past_key", ("[2, 2, 7, 9]", "8")),
    Refusal("another value head size", {"past_value": reshaped(2, 2, 7, 9)}, "past_value", ("[2, 2, 7, 9]", "past_len, v_head_size]", "8")),
    Refusal("lengths differ", {"past_value": reshaped(2, 2, 6, 8)}, "past_value", ("6", "past_key", "7")),
    Refusal("mask for the new keys only", {"attn_mask": zeros(3, 13)}, "attn_mask", ("13", "12 keys")),
]


@pytest.mark.parametrize("refusal", INPUTS, ids=str)
def test_inputs(refusal: Refusal) -> None:
    check(refusal, ops.attention.default, four_dimensional())


@pytest.mark.parametrize("refusal", INPUTS_3D, ids=str)
def test_3d_inputs(refusal: Refusal) -> None:
    check(refusal, ops.attention.default, three_dimensional())


@pytest.mark.parametrize("refusal", [*ATTRIBUTES, *MASKS, *LENGTHS], ids=str)
@pytest.mark.parametrize("overload", ["default", "qk", "lse"])
def test_attributes_masks_and_lengths(refusal: Refusal, overload: str) -> None:
    extra: dict[str, dict[str, Any]] = {"default": {}, "qk": {"qk_matmul_output_mode": 0}, "lse": {"return_lse": True}}
    check(refusal, getattr(ops.attention, overload), four_dimensional() | extra[overload])


@pytest.mark.parametrize("refusal", [*PAST, *ATTRIBUTES], ids=str)
@pytest.mark.parametrize("overload", ["kv", "kv_qk"])
def test_past(refusal: Refusal, overload: str) -> None:
    extra: dict[str, Any] = {"qk_matmul_output_mode": 3} if overload == "kv_qk" else {}
    check(
        refusal,
        getattr(ops.attention, overload),
        four_dimensional() | {"past_key": zeros(2, 2, 7, 8), "past_value": zeros(2, 2, 7, 8)} | extra,
    )


@pytest.mark.parametrize("mode", [-1, 4, 10])
def test_score_modes(mode: int) -> None:
    refusal = Refusal("", {"qk_matmul_output_mode": mode}, "qk_matmul_output_mode", (str(mode), "0", "1", "2", "3"))
    check(refusal, ops.attention.qk, four_dimensional() | {"qk_matmul_output_mode": 0})
    past = {"past_key": zeros(2, 2, 7, 8), "past_value": zeros(2, 2, 7, 8)}
    check(refusal, ops.attention.kv_qk, four_dimensional() | past | {"qk_matmul_output_mode": 0})


def test_flags_that_choose_an_overload_must_be_true() -> None:
    with pytest.raises(RuntimeError, match=r"^return_lse: .*false"):
        ops.attention.lse(**four_dimensional(), return_lse=False)
    query = zeros(2, 3, 16)
    with pytest.raises(RuntimeError, match=r"^output_qk: .*false"):
        ops.mha.qk(query, query, query, num_heads=2, output_qk=False)


def test_python_functions_refuse_half_a_cache() -> None:
    past = zeros(2, 2, 7, 8)
    with pytest.raises(RuntimeError, match=r"^past_key: .*missing.*past_value"):
        torch_onnx_attn.attention(**four_dimensional(), past_value=past)
    with pytest.raises(RuntimeError, match=r"^past_value: .*missing.*past_key"):
        torch_onnx_attn.attention(**four_dimensional(), past_key=past)
    query = zeros(2, 3, 16)
    for length in (None, torch.tensor([1])):
        with pytest.raises(RuntimeError, match=r"^past_value: .*missing"):
            torch_onnx_attn.mha(query, query, query, past_key=past, past_sequence_length=length, num_heads=2)
    with pytest.raises(RuntimeError, match=r"^past_key: .*missing"):
        torch_onnx_attn.mha(query, query, query, past_value=past, num_heads=2)
    with pytest.raises(RuntimeError, match=r"^output_qk: .*past_sequence_length"):
        torch_onnx_attn.mha(
            query, query, query, past_key=past, past_value=past.clone(), past_sequence_length=torch.tensor([1]), num_heads=2, output_qk=True
        )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["K", "V", "attn_mask", "nonpad_kv_seqlen"])
def test_devices_differ(name: str) -> None:
    inputs = four_dimensional() | {"attn_mask": zeros(3, 5), "nonpad_kv_seqlen": torch.tensor([1, 2])}
    inputs = {key: value.cuda() for key, value in inputs.items()} | {name: inputs[name]}
    with pytest.raises(RuntimeError, match=rf"^{name}: .*cpu.*Q.*cuda"):
        ops.attention.default(**inputs)


@pytest.mark.gpu
def test_past_on_another_device() -> None:
    inputs = {key: value.cuda() for key, value in four_dimensional().items()}
    with pytest.raises(RuntimeError, match=r"^past_value: .*cpu.*cuda"):
        ops.attention.kv(**inputs, past_key=zeros(2, 2, 7, 8).cuda(), past_value=zeros(2, 2, 7, 8))


# ---------------------------------------------------------------------------------------------------------------------
# attention_cached: caches of 10 rows


def cached() -> dict[str, Any]:
    caches = {"key_cache": zeros(2, 2, 10, 8), "value_cache": zeros(2, 2, 10, 8), "cache_lengths": torch.tensor([0, 4])}
    return four_dimensional() | caches


CACHED = [
    Refusal("does not fit", {"cache_lengths": torch.tensor([0, 6])}, "cache_lengths", ("1", "6", "5", "10")),
    Refusal("negative", {"cache_lengths": torch.tensor([-1, 0])}, "cache_lengths", ("0", "-1")),
    Refusal("float lengths", {"cache_lengths": zeros(2)}, "cache_lengths", ("float32", "int64")),
    Refusal("wrong batch of lengths", {"cache_lengths": torch.tensor([1, 2, 3])}, "cache_lengths", ("[3]", "[2]")),
    Refusal("scalar length", {"cache_lengths": torch.tensor(3)}, "cache_lengths", ("[]", "[2]")),
    Refusal("more rows than the caches", {"K": reshaped(2, 2, 11, 8), "V": reshaped(2, 2, 11, 8)}, "K", ("11", "10")),
    Refusal("key cache of another type", {"key_cache": cast(torch.float16)}, "key_cache", ("float16", "float32")),
    Refusal("value cache of another type", {"value_cache": cast(torch.float64)}, "value_cache", ("float64", "V", "float32")),
    Refusal(
        "key cache of rank 3", {"key_cache": reshaped(2, 10, 16)}, "key_cache", ("[2, 10, 16]", "capacity, head_size]", "capacity, 8]")
    ),
    Refusal("key cache with query heads", {"key_cache": reshaped(2, 4, 10, 8)}, "key_cache", ("[2, 4, 10, 8]",)),
    Refusal(
        "value cache of another head size",
        {"value_cache": reshaped(2, 2, 10, 9)},
        "value_cache",
        ("[2, 2, 10, 9]", "capacity, v_head_size]", "capacity, 8]"),
    ),
    Refusal("capacities differ", {"value_cache": reshaped(2, 2, 9, 8)}, "value_cache", ("9", "key_cache", "10")),
    Refusal("key cache with a strided last axis", {"key_cache": zeros(2, 2, 10, 16)[..., ::2]}, "key_cache", ("stride 2", "1")),
    Refusal("value cache with a strided last axis", {"value_cache": zeros(2, 2, 8, 10).transpose(2, 3)}, "value_cache", ("stride 10", "1")),
    Refusal("mask longer than the caches", {"attn_mask": zeros(3, 11)}, "attn_mask", ("11", "10 keys")),
    *ATTRIBUTES,
]


@pytest.mark.parametrize("refusal", CACHED, ids=str)
def test_cached(refusal: Refusal) -> None:
    check(refusal, ops.attention_cached.default, cached())


def test_a_refused_call_writes_nothing() -> None:
    inputs = cached() | {"key_cache": torch.ones(2, 2, 10, 8), "cache_lengths": torch.tensor([0, 9])}
    with pytest.raises(RuntimeError, match="cache_lengths"):
        ops.attention_cached(**inputs)
    assert bool((inputs["key_cache"] == 1).all())


# ---------------------------------------------------------------------------------------------------------------------
# tensor_scatter, valid_kv_length


def scatter() -> dict[str, Any]:
    return {"past_cache": zeros(2, 3, 6, 4), "update": zeros(2, 3, 2, 4), "write_indices": torch.tensor([0, 4])}


SCATTER = [
    Refusal("does not fit", {"write_indices": torch.tensor([0, 5])}, "write_indices", ("1", "5", "2", "6")),
    Refusal("negative", {"write_indices": torch.tensor([-1, 0])}, "write_indices", ("0", "-1")),
    Refusal("negative circular", {"write_indices": torch.tensor([-1, 0]), "circular": True}, "write_indices", ("-1", "negative")),
    Refusal("int32 indices", {"write_indices": torch.tensor([0, 4], dtype=torch.int32)}, "write_indices", ("int32", "int64")),
    Refusal("wrong batch of indices", {"write_indices": torch.tensor([0])}, "write_indices", ("[1]", "[2]")),
    Refusal("indices of rank 2", {"write_indices": torch.tensor([[0], [0]])}, "write_indices", ("[2, 1]", "[2]")),
    Refusal("batch axis", {"axis": 0}, "axis", ("0", "batch")),
    Refusal("negative batch axis", {"axis": -4}, "axis", ("-4", "batch")),
    Refusal("axis too large", {"axis": 4}, "axis", ("4",)),
    Refusal("axis too small", {"axis": -5}, "axis", ("-5",)),
    Refusal("another type", {"update": cast(torch.float16)}, "update", ("float16", "float32")),
    Refusal("another rank", {"update": reshaped(2, 3, 4)}, "update", ("[2, 3, 4]", "4")),
    Refusal("another batch", {"update": reshaped(1, 3, 2, 4)}, "update", ("[1, 3, 2, 4]", "[2, 3, 6, 4]", "axis 2")),
    Refusal("other columns", {"update": reshaped(2, 3, 2, 5)}, "update", ("[2, 3, 2, 5]", "[2, 3, 6, 4]", "axis 2")),
    Refusal("more rows than the cache", {"update": reshaped(2, 3, 7, 4), "circular": True}, "update", ("7", "6")),
]


@pytest.mark.parametrize("refusal", SCATTER, ids=str)
@pytest.mark.parametrize("in_place", [False, True])
def test_scatter(refusal: Refusal, in_place: bool) -> None:
    legal = scatter()
    if in_place:
        legal["cache"] = legal.pop("past_cache")
    check(refusal, ops.tensor_scatter_.default if in_place else ops.tensor_scatter.default, legal)


def test_scatter_ranks() -> None:
    for shape in ((4,), (1,) * 9):
        with pytest.raises(RuntimeError, match=r"^past_cache: .*axes"):
            ops.tensor_scatter(zeros(*shape), zeros(*shape), axis=-1)


def test_a_pure_scatter_takes_an_expanded_cache() -> None:
    ops.tensor_scatter(zeros(1, 3, 6, 4).expand(2, 3, 6, 4), zeros(2, 3, 2, 4))  # which it copies


VALID_LENGTH = [
    Refusal("integers", {"attn_mask": cast(torch.int64)}, "attn_mask", ("int64", "bool")),
    Refusal("complex", {"attn_mask": cast(torch.complex64)}, "attn_mask", ("complex64", "bool")),
    Refusal("rank 0", {"attn_mask": torch.tensor(True)}, "attn_mask", ("rank 0", "1 to 4")),
    Refusal("rank 5", {"attn_mask": reshaped(1, 1, 1, 1, 5)}, "attn_mask", ("rank 5", "1 to 4")),
]


@pytest.mark.parametrize("refusal", VALID_LENGTH, ids=str)
def test_valid_kv_length(refusal: Refusal) -> None:
    check(refusal, ops.valid_kv_length.default, {"attn_mask": zeros(1, 1, 3, 5)})
