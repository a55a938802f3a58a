"""What the kernels refuse is refused when a call is traced, too: an exported graph may never run here. Values are not looked at."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusals import Refusal, zeros
from test_errors import (
    ATTRIBUTES,
    CACHED,
    INPUTS,
    INPUTS_3D,
    LENGTHS,
    MASKS,
    PAST,
    SCATTER,
    cached,
    four_dimensional,
    scatter,
    three_dimensional,
)
from test_errors_mha import BNSH, MHA, MHA_PAST, PACKED_KV, PACKED_QKV, SHARED, separate, shared, with_past
from torch import Tensor
from ways import trace

ops = torch.ops.onnx_attn
OF_VALUES = {  # what lengths and indices hold
    *("beyond the keys", "negative", "negative circular", "does not fit"),
    *("negative length", "full", "mask narrower than the keys", "bias narrower than the keys", "beam too large", "beam negative"),
}


def past() -> dict[str, Any]:
    return four_dimensional() | {"past_key": zeros(2, 2, 7, 8), "past_value": zeros(2, 2, 7, 8)}


def four_dimensional_keys() -> dict[str, Any]:
    return {"query": zeros(2, 3, 16), "key": zeros(2, 2, 5, 8), "value": zeros(2, 2, 5, 8), "num_heads": 2}


def packed_keys() -> dict[str, Any]:
    return {"query": zeros(2, 3, 16), "key": zeros(2, 5, 2, 2, 8), "num_heads": 2}


def packed() -> dict[str, Any]:
    return {"query": zeros(2, 3, 2, 3, 8), "num_heads": 2}


TABLES: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]], list[Refusal]]] = {
    "attention": (ops.attention.default, four_dimensional, [*INPUTS, *ATTRIBUTES, *MASKS, *LENGTHS]),
    "attention, 3-D": (ops.attention.default, three_dimensional, INPUTS_3D),
    "attention.kv": (ops.attention.kv, past, PAST),
    "attention_cached": (ops.attention_cached, cached, CACHED),
    "mha": (ops.mha.default, separate, MHA),
    "mha, 4-D keys": (ops.mha.default, four_dimensional_keys, BNSH),
    "mha, packed keys": (ops.mha.default, packed_keys, PACKED_KV),
    "mha, packed": (ops.mha.default, packed, PACKED_QKV),
    "mha.kv": (ops.mha.kv, with_past, MHA_PAST),
    "mha.shared": (ops.mha.shared, shared, SHARED),
    "tensor_scatter": (ops.tensor_scatter, scatter, SCATTER),
}
CASES = [
    pytest.param(op, legal, refusal, id=f"{table}: {refusal}")
    for table, (op, legal, refusals) in TABLES.items()
    for refusal in refusals
    if refusal.name not in OF_VALUES
]


@pytest.mark.parametrize(("op", "legal", "refusal"), CASES)
def test_refused(op: Callable[..., Any], legal: Callable[[], dict[str, Any]], refusal: Refusal) -> None:
    trace(op, legal())
    arguments = legal()
    for name, value in refusal.change.items():
        arguments[name] = value(arguments[name]) if callable(value) and not isinstance(value, Tensor) else value
    given = {name: value for name, value in arguments.items() if value is not None}
    with pytest.raises(RuntimeError, match=rf"^{re.escape(refusal.argument)}[,:]"):
        trace(op, given)


@pytest.mark.parametrize("columns", [1, 5, 12])
def test_masks_of_a_shared_buffer_may_be_as_narrow_as_what_is_filled(columns: int) -> None:
    inputs = shared() | {"key_padding_mask": zeros(2, columns, dtype=torch.int32), "attention_bias": zeros(1, 2, 1, columns)}
    assert trace(ops.mha.shared, inputs).shape == (2, 1, 16)
