"""Every illegal call of mha is refused, in a message that names the argument, what was given, and what is allowed.

The legal call: 2 entries, 2 heads of 8, 3 queries, 5 keys.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from refusals import Refusal, cast, check, reshaped, zeros
from torch import Tensor

ops = torch.ops.onnx_attn
NAN, INF = float("nan"), float("inf")


def separate() -> dict[str, Any]:
    return {"query": zeros(2, 3, 16), "key": zeros(2, 5, 16), "value": zeros(2, 5, 16), "num_heads": 2}


def with_past(rows: int = 7) -> dict[str, Any]:
    return separate() | {"past_key": zeros(2, 2, rows, 8), "past_value": zeros(2, 2, rows, 8)}


MHA = [
    Refusal("float64", {name: cast(torch.float64) for name in ("query", "key", "value")}, "query", ("float64", "float32")),
    Refusal("complex", {"query": cast(torch.complex64)}, "query", ("complex64",)),
    Refusal("key of another type", {"key": cast(torch.float16)}, "key", ("float16", "query", "float32")),
    Refusal("value of another type", {"value": cast(torch.bfloat16)}, "value", ("bfloat16", "query", "float32")),
    Refusal("query of rank 2", {"query": reshaped(6, 16)}, "query", ("[6, 16]",)),
    Refusal("query of rank 4", {"query": reshaped(2, 2, 3, 8)}, "query", ("[2, 2, 3, 8]",)),
    Refusal("query alone", {"key": None, "value": None}, "key", ("missing", "[2, 3, 16]")),
    Refusal("packed rank 3", {"query": reshaped(2, 3, 48), "key": None, "value": None}, "key", ("missing", "[2, 3, 48]")),
    Refusal("value without key", {"key": None}, "key", ("missing",)),
    Refusal("key without value", {"value": None}, "value", ("missing", "[2, 5, 16]")),
    Refusal("key of rank 4, value of rank 3", {"key": reshaped(2, 2, 5, 8)}, "value", ("[2, 5, 16]", "4-D")),
    Refusal("key of rank 3, value of rank 4", {"value": reshaped(2, 2, 5, 8)}, "value", ("[2, 2, 5, 8]", "3-D")),
    Refusal("key of rank 2", {"key": reshaped(10, 16)}, "key", ("[10, 16]",)),
    Refusal("key of another width", {"key": reshaped(2, 5, 18)}, "key", ("18", "query", "16")),
    Refusal("key of another batch", {"key": reshaped(3, 5, 16)}, "key", ("3", "query", "2")),
    Refusal("value of another batch", {"value": reshaped(1, 5, 16)}, "value", ("1", "query", "2")),
    Refusal("value of another length", {"value": reshaped(2, 6, 16)}, "value", ("6", "key", "5")),
    Refusal("num_heads 0", {"num_heads": 0}, "num_heads", ("0", "positive")),
    Refusal("num_heads negative", {"num_heads": -2}, "num_heads", ("-2", "positive")),
    Refusal("query is no multiple", {"num_heads": 3}, "query", ("16", "multiple", "num_heads", "3")),
    Refusal("value is no multiple", {"value": reshaped(2, 5, 17)}, "value", ("17", "multiple", "num_heads", "2")),
    Refusal("head size 0", {"query": reshaped(2, 3, 0), "key": reshaped(2, 5, 0)}, "query", ("head size 0",)),
    Refusal("v_head_size 0", {"value": reshaped(2, 5, 0)}, "value", ("head size 0",)),
    Refusal("NaN scale", {"scale": NAN}, "scale", ("nan",)),
    Refusal("infinite scale", {"scale": -INF}, "scale", ("inf",)),
    Refusal("NaN filter", {"mask_filter_value": NAN}, "mask_filter_value", ("NaN",)),
    Refusal("bias too short", {"bias": zeros(32)}, "bias", ("[32]", "48")),
    Refusal("bias of rank 2", {"bias": zeros(1, 48)}, "bias", ("[1, 48]", "48")),
    Refusal("bias of another type", {"bias": zeros(48, dtype=torch.float16)}, "bias", ("float16", "query", "float32")),
    Refusal("mask for everyone", {"key_padding_mask": zeros(1, 5, dtype=torch.int32)}, "key_padding_mask", ("[1, 5]", "5 keys")),
    Refusal("mask of 2B", {"key_padding_mask": zeros(4, dtype=torch.int32)}, "key_padding_mask", ("[4]", "[3 * batch + 2]")),
    Refusal("mask of rank 4", {"key_padding_mask": zeros(2, 1, 3, 5, dtype=torch.int32)}, "key_padding_mask", ("[2, 1, 3, 5]",)),
    Refusal("scalar mask", {"key_padding_mask": torch.tensor(1, dtype=torch.int32)}, "key_padding_mask", ("[]",)),
    Refusal("mask too short", {"key_padding_mask": zeros(2, 4, dtype=torch.int32)}, "key_padding_mask", ("[2, 4]", "5 keys")),
    Refusal("mask too long", {"key_padding_mask": zeros(2, 6, dtype=torch.int32)}, "key_padding_mask", ("[2, 6]", "5 keys")),
    Refusal(
        "mask rows do not broadcast",
        {"key_padding_mask": zeros(2, 1, 5, dtype=torch.int32)},
        "key_padding_mask",
        ("[2, 1, 5]", "3 queries"),
    ),
    Refusal("float mask", {"key_padding_mask": zeros(2, 5)}, "key_padding_mask", ("float32", "int32")),
    Refusal("int8 mask", {"key_padding_mask": zeros(2, 5, dtype=torch.int8)}, "key_padding_mask", ("int8", "int32")),
    Refusal("bool lengths", {"key_padding_mask": zeros(2, dtype=torch.bool)}, "key_padding_mask", ("bool", "[2]", "int32")),
    Refusal("attention_bias of rank 3", {"attention_bias": zeros(2, 3, 5)}, "attention_bias", ("[2, 3, 5]",)),
    Refusal("attention_bias rows do not broadcast", {"attention_bias": zeros(1, 1, 1, 5)}, "attention_bias", ("[1, 1, 1, 5]", "3, 5")),
    Refusal("attention_bias keys do not broadcast", {"attention_bias": zeros(1, 1, 3, 1)}, "attention_bias", ("[1, 1, 3, 1]", "3, 5")),
    Refusal("attention_bias of other heads", {"attention_bias": zeros(1, 3, 3, 5)}, "attention_bias", ("[1, 3, 3, 5]", "2 or 1")),
    Refusal("attention_bias of another batch", {"attention_bias": zeros(3, 1, 3, 5)}, "attention_bias", ("[3, 1, 3, 5]", "2 or 1")),
    Refusal(
        "attention_bias of another type",
        {"attention_bias": zeros(1, 1, 3, 5, dtype=torch.float16)},
        "attention_bias",
        ("float16", "float32"),
    ),
]

BNSH = [
    Refusal("value of another head size", {"value": reshaped(2, 2, 5, 6)}, "value", ("[2, 2, 5, 6]", "[2, 2, 5, 8]")),
    Refusal("value of another length", {"value": reshaped(2, 2, 6, 8)}, "value", ("[2, 2, 6, 8]", "[2, 2, 5, 8]")),
    Refusal("other heads", {"key": reshaped(2, 3, 5, 8), "value": reshaped(2, 3, 5, 8)}, "key", ("3", "[2, 3, 5, 8]", "2")),
    Refusal("another head size", {"key": reshaped(2, 2, 5, 9), "value": reshaped(2, 2, 5, 9)}, "key", ("9", "query", "8")),
    Refusal("bias for the query only", {"bias": zeros(16)}, "bias", ("[16]", "48")),
]

PACKED_KV = [
    Refusal("with value", {"value": zeros(2, 5, 16)}, "value", ("absent", "[2, 5, 2, 2, 8]")),
    Refusal("with bias", {"bias": zeros(48)}, "bias", ("packed",)),
    Refusal("three parts", {"key": reshaped(2, 5, 2, 3, 8)}, "key", ("[2, 5, 2, 3, 8]", "2, 2, 8")),
    Refusal("other heads", {"key": reshaped(2, 5, 3, 2, 8)}, "key", ("[2, 5, 3, 2, 8]", "2, 2, 8")),
    Refusal("another head size", {"key": reshaped(2, 5, 2, 2, 9)}, "key", ("[2, 5, 2, 2, 9]", "2, 2, 8")),
]

PACKED_QKV = [
    Refusal("with key", {"key": zeros(2, 3, 16)}, "key", ("absent", "[2, 3, 2, 3, 8]")),
    Refusal("with value", {"value": zeros(2, 3, 16)}, "value", ("absent", "[2, 3, 2, 3, 8]")),
    Refusal("two parts", {"query": reshaped(2, 3, 2, 2, 8)}, "query", ("[2, 3, 2, 2, 8]", "2, 3, 8")),
    Refusal("other heads", {"num_heads": 4}, "query", ("[2, 3, 2, 3, 8]", "4, 3, 8")),
]

MHA_PAST = [
    Refusal("half a cache", {"past_value": None}, "past_value", ("missing", "past_key")),
    Refusal("mask for the new keys only", {"key_padding_mask": zeros(2, 5, dtype=torch.int32)}, "key_padding_mask", ("[2, 5]", "12 keys")),
    Refusal("bias for the new keys only", {"attention_bias": zeros(1, 1, 3, 5)}, "attention_bias", ("[1, 1, 3, 5]", "3, 12")),
    Refusal("key of another type", {"past_key": cast(torch.float16)}, "past_key", ("float16", "float32")),
    Refusal("other heads", {"past_key": reshaped(2, 3, 7, 8)}, "past_key", ("[2, 3, 7, 8]",)),
    Refusal("another batch", {"past_key": reshaped(1, 2, 7, 8)}, "past_key", ("[1, 2, 7, 8]",)),
    Refusal("rank 3", {"past_value": reshaped(2, 7, 16)}, "past_value", ("[2, 7, 16]",)),
    Refusal("lengths differ", {"past_value": reshaped(2, 2, 6, 8)}, "past_value", ("6", "past_key", "7")),
    Refusal(
        "values of another head size",
        {"value": reshaped(2, 5, 12), "past_value": reshaped(2, 2, 7, 6)},
        "past_value",
        ("[2, 2, 7, 6]", "8"),
    ),
    Refusal("new values of another head size", {"value": reshaped(2, 5, 12)}, "value", ("6", "8")),
    Refusal("packed key", {"key": reshaped(2, 5, 2, 2, 8), "value": None}, "past_key", ("packed",)),
]


def shared() -> dict[str, Any]:
    """A buffer of 12 rows with 4 in use; one query and one new key, as beams want it."""
    step = {"query": zeros(2, 1, 16), "key": zeros(2, 1, 16), "value": zeros(2, 1, 16)}
    cache = {"past_sequence_length": torch.tensor([4], dtype=torch.int32), "cache_indirection": zeros(1, 2, 12, dtype=torch.int32)}
    return with_past(12) | step | cache


def beam_outside(row: int, beam: int) -> Tensor:
    index = zeros(1, 2, 12, dtype=torch.int32)
    index[0, 1, row] = beam
    return index


LENGTH = "past_sequence_length"
SHARED = [
    Refusal("negative length", {LENGTH: torch.tensor([-1])}, LENGTH, ("-1", "12")),
    Refusal("full", {LENGTH: torch.tensor([12])}, LENGTH, ("12",)),
    Refusal(
        "does not fit", {LENGTH: torch.tensor([10]), **{n: zeros(2, 3, 16) for n in ("query", "key", "value")}}, LENGTH, ("10", "3", "12")
    ),
    Refusal("two lengths", {LENGTH: torch.tensor([4, 4])}, LENGTH, ("[2]", "one element")),
    Refusal("length of rank 2", {LENGTH: torch.tensor([[4]])}, LENGTH, ("[1, 1]",)),
    Refusal("float length", {LENGTH: zeros(1)}, LENGTH, ("float32", "int32")),
    Refusal("more rows than the buffer", {n: zeros(2, 13, 16) for n in ("query", "key", "value")}, "key", ("13", "12")),
    Refusal("mask narrower than the keys", {"key_padding_mask": zeros(2, 4, dtype=torch.int32)}, "key_padding_mask", ("[2, 4]", "5")),
    Refusal("mask wider than the buffer", {"key_padding_mask": zeros(2, 13, dtype=torch.int32)}, "key_padding_mask", ("[2, 13]", "12")),
    Refusal("bias narrower than the keys", {"attention_bias": zeros(1, 1, 1, 4)}, "attention_bias", ("[1, 1, 1, 4]", "5")),
    Refusal("strided last axis", {"past_key": zeros(2, 2, 12, 16)[..., ::2]}, "past_key", ("stride 2", "1")),
    Refusal(
        "values of another head size",
        {"value": zeros(2, 1, 12), "past_value": reshaped(2, 2, 12, 6)},
        "past_value",
        ("[2, 2, 12, 6]", "capacity, head_size]", "capacity, 8]"),
    ),
    Refusal("beam too large", {"cache_indirection": beam_outside(3, 2)}, "cache_indirection", ("1", "3", "2")),
    Refusal("beam negative", {"cache_indirection": beam_outside(0, -1)}, "cache_indirection", ("-1",)),
    Refusal("beams of another batch", {"cache_indirection": zeros(2, 2, 12, dtype=torch.int32)}, "cache_indirection", ("[2, 2, 12]", "2")),
    Refusal(
        "beams of another capacity", {"cache_indirection": zeros(1, 2, 8, dtype=torch.int32)}, "cache_indirection", ("[1, 2, 8]", "12")
    ),
    Refusal("beams of rank 2", {"cache_indirection": zeros(2, 12, dtype=torch.int32)}, "cache_indirection", ("[2, 12]",)),
    Refusal("float beams", {"cache_indirection": zeros(1, 2, 12)}, "cache_indirection", ("float32", "int32")),
    Refusal("beams with two new keys", {"key": zeros(2, 2, 16), "value": zeros(2, 2, 16)}, "cache_indirection", ("2",)),
]


@pytest.mark.parametrize("refusal", MHA, ids=str)
@pytest.mark.parametrize("overload", ["default", "qk"])
def test_mha(refusal: Refusal, overload: str) -> None:
    check(refusal, getattr(ops.mha, overload), separate() | ({"output_qk": True} if overload == "qk" else {}))


@pytest.mark.parametrize("refusal", BNSH, ids=str)
def test_mha_bnsh(refusal: Refusal) -> None:
    check(refusal, ops.mha.default, {"query": zeros(2, 3, 16), "key": zeros(2, 2, 5, 8), "value": zeros(2, 2, 5, 8), "num_heads": 2})


@pytest.mark.parametrize("refusal", PACKED_KV, ids=str)
def test_mha_packed_kv(refusal: Refusal) -> None:
    check(refusal, ops.mha.default, {"query": zeros(2, 3, 16), "key": zeros(2, 5, 2, 2, 8), "num_heads": 2})


@pytest.mark.parametrize("refusal", PACKED_QKV, ids=str)
def test_mha_packed_qkv(refusal: Refusal) -> None:
    check(refusal, ops.mha.default, {"query": zeros(2, 3, 2, 3, 8), "num_heads": 2})


def test_mha_packed_query_has_no_past() -> None:
    with pytest.raises(RuntimeError, match=r"^past_key: .*packed"):
        ops.mha.kv(zeros(2, 3, 2, 3, 8), past_key=zeros(2, 2, 7, 8), past_value=zeros(2, 2, 7, 8), num_heads=2)


@pytest.mark.parametrize("refusal", [*MHA_PAST, *(r for r in MHA if "mask" in r.name)], ids=str)
@pytest.mark.parametrize("overload", ["kv", "kv_qk"])
def test_mha_past(refusal: Refusal, overload: str) -> None:
    if refusal.says[-1] == "5 keys":  # there are 12 of them here
        refusal = dataclasses.replace(refusal, says=(*refusal.says[:-1], "12 keys"))
    check(refusal, getattr(ops.mha, overload), with_past() | ({"output_qk": True} if overload == "kv_qk" else {}))


@pytest.mark.parametrize("refusal", SHARED, ids=str)
def test_mha_shared(refusal: Refusal) -> None:
    check(refusal, ops.mha.shared, shared())
