"""What the outputs of a call are when one known defect of another implementation is present.

An imitation takes the call and the outputs as they should be, and returns the outputs that the defect changes: the value in their
place, and where anything at all may stand.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..call import Call

__all__ = ["Imitation", "Outcome"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One output with a defect in it. `anything` is True where no value is predicted, or None."""

    value: Tensor
    anything: Tensor | None = None
    absolute: float = 0.0  # further error that the defect brings, of an output that is otherwise right


Imitation = Callable[[Call, Mapping[str, Tensor]], dict[str, Outcome]]

_FLOAT16_LARGEST = 65504.0


# ---------------------------------------------------------------------------------------------------------------------
# ai.onnx::Attention
# ---------------------------------------------------------------------------------------------------------------------


def lowest_for_infinity(call: Call, expected: Mapping[str, Tensor]) -> dict[str, Outcome]:
    scores = expected["qk_matmul_output"]
    lowest = torch.finfo(call.tensors["Q"].dtype).min
    return {"qk_matmul_output": Outcome(torch.where(scores == -math.inf, _scores(call, 1) + lowest, scores))}


def rows_of_lowest_are_zero(call: Call, expected: Mapping[str, Tensor]) -> dict[str, Outcome]:
    mask = call.tensors["attn_mask"]
    low = mask <= torch.finfo(mask.dtype).min  # -inf too
    if call.attributes.get("is_causal") and mask.dim() >= 2:
        hidden = torch.arange(mask.shape[-1]) > torch.arange(mask.shape[-2])[:, None] + _offset(call)
        low = low | hidden
    return _at_rows(call, expected, low.all(-1), 0.0)


def padding_spreads(call: Call, expected: Mapping[str, Tensor]) -> dict[str, Outcome]:
    K, V, lengths = call.tensors["K"], call.tensors["V"], call.tensors["nonpad_kv_seqlen"]
    axis = 2 if K.dim() == 4 else 1
    padding = torch.arange(K.shape[axis]) >= lengths[:, None]
    padding = padding[:, None, :, None] if K.dim() == 4 else padding[:, :, None]
    spoiled = torch.stack([(~x.isfinite() & padding).flatten(1).any(1) for x in (K, V)]).any(0)
    return {
        name: Outcome(value, spoiled.reshape(-1, *[1] * (value.dim() - 1)).expand_as(value))
        for name, value in expected.items()
        if name in ("Y", "qk_matmul_output")
    }


def float16_scores_overflow(call: Call, expected: Mapping[str, Tensor]) -> dict[str, Outcome]:
    raw = _scores(call, 0)
    beyond = (raw.abs() >= _FLOAT16_LARGEST).any(-1)
    made = _at_rows(call, expected, beyond, None)
    if "qk_matmul_output" in expected:
        made["qk_matmul_output"] = Outcome(expected["qk_matmul_output"], beyond[..., None].expand_as(expected["qk_matmul_output"]))
    return made


def dead_rows_are_nan(call: Call, expected: Mapping[str, Tensor]) -> dict[str, Outcome]:
    dead = _scores(call, 3).sum(-1) == 0
    made = _at_rows(call, expected, dead, math.nan)
    if call.attributes.get("qk_matmul_output_mode") == 3:
        made["qk_matmul_output"] = Outcome(expected["qk_matmul_output"].masked_fill(dead[..., None], math.nan))
    return made


def causality_skipped(call: Call, expected: Mapping[str, Tensor]) -> dict[str, Outcome]:
    attributes = {name: value for name, value in call.attributes.items() if name != "is_causal"}
    changed = dataclasses.replace(call, attributes=attributes).expected()
    return {name: Outcome(value) for name, value in changed.items() if name in ("Y", "qk_matmul_output")}


def float32_scale(call: Call, expected: Mapping[str, Tensor]) -> dict[str, Outcome]:
    """The product is off by a rounding error of float32, so the weights by twice its size."""
    error = float(_scores(call, 0).abs().nan_to_num(0.0, 0.0).amax()) * 2**-23 if expected["Y"].numel() else 0.0
    value = float(call.tensors["V"].double().abs().nan_to_num(0.0, 0.0).amax()) if expected["Y"].numel() else 0.0
    sizes = {"Y": 2 * error * value, "qk_matmul_output": error}
    return {name: Outcome(expected[name], absolute=size) for name, size in sizes.items() if name in expected}


def capped_product(call: Call, expected: Mapping[str, Tensor]) -> dict[str, Outcome]:
    return {"qk_matmul_output": Outcome(_scores(call, 1))}


def rows_after_the_first(call: Call, expected: Mapping[str, Tensor]) -> dict[str, Outcome]:
    """The limit of row 0 for all: the same as the rows with an explicit mask."""
    mask = call.tensors["attn_mask"]
    columns = torch.arange(mask.shape[-1])
    if "nonpad_kv_seqlen" in call.tensors:
        limit = (call.tensors["nonpad_kv_seqlen"] - _rows(call))[:, None, None, None]
    else:
        limit = torch.full((1, 1, 1, 1), _offset(call))
    allowed = columns <= limit
    mask = mask & allowed if mask.dtype == torch.bool else torch.where(allowed, mask.double(), -math.inf)
    attributes = {name: value for name, value in call.attributes.items() if name != "is_causal"}
    changed = dataclasses.replace(call, tensors={**call.tensors, "attn_mask": mask}, attributes=attributes).expected()
    return {name: Outcome(value) for name, value in changed.items() if name in ("Y", "qk_matmul_output")}


def _offset(call: Call) -> int:
    past = call.tensors.get("past_key")
    return 0 if past is None else past.shape[2]


def _rows(call: Call) -> int:
    first = call.tensors["query" if call.op == "mha" else "Q"]
    return first.shape[2 if call.op != "mha" and first.dim() == 4 else 1]


def _scores(call: Call, mode: int) -> Tensor:
    arguments: dict[str, Any] = {**call.tensors, **call.attributes, "qk_matmul_output_mode": mode}
    scores = reference.attention(**arguments).qk_matmul_output
    assert scores is not None
    return scores


def _at_rows(call: Call, expected: Mapping[str, Tensor], rows: Tensor, value: float | None) -> dict[str, Outcome]:
    """Y with `value`, or with anything, at some rows: bool, broadcastable to [batch, heads, rows]."""
    Y = expected["Y"]
    if Y.dim() == 4:
        where = rows[..., None].expand_as(Y)
    else:
        heads = call.attributes["q_num_heads"]
        split = Y.unflatten(2, (heads, -1)).transpose(1, 2)
        where = rows[..., None].expand_as(split).transpose(1, 2).flatten(2)
    return {"Y": Outcome(Y, where) if value is None else Outcome(Y.masked_fill(where, value))}


# ---------------------------------------------------------------------------------------------------------------------
# com.microsoft::MultiHeadAttention
# ---------------------------------------------------------------------------------------------------------------------


def everything(call: Call, expected: Mapping[str, Tensor]) -> dict[str, Outcome]:
    return {name: Outcome(value, torch.ones_like(value, dtype=torch.bool)) for name, value in expected.items()}


def causal_top_left(call: Call, expected: Mapping[str, Tensor]) -> dict[str, Outcome]:
    plain = _mha(call)
    assert plain.qk is not None
    rows, keys = plain.qk.shape[-2:]
    allowed = torch.arange(keys) <= torch.arange(rows)[:, None] + _offset(call)
    allowed[-1] = True
    bias = torch.zeros((1, 1, rows, keys), dtype=torch.float64).masked_fill(~allowed, -math.inf)
    given = call.tensors.get("attention_bias")
    bias = bias if given is None else bias + given.double()
    made = _mha(call, attention_bias=bias, unidirectional=False)
    outcomes = {"output": Outcome(made.output)}
    if "qk" in expected:
        outcomes["qk"] = Outcome(expected["qk"], torch.ones_like(expected["qk"], dtype=torch.bool))
    return outcomes


def causal_is_added(call: Call, expected: Mapping[str, Tensor]) -> dict[str, Outcome]:
    made = _mha(call)
    assert made.qk is not None
    weights = torch.softmax(made.qk, -1)
    keys = made.qk.shape[-1]
    return {"output": Outcome((weights @ made.present_value[:, :, :keys]).transpose(1, 2).flatten(2))}


def empty_rows_are_nan(call: Call, expected: Mapping[str, Tensor]) -> dict[str, Outcome]:
    made = _mha(call)
    assert made.qk is not None
    rows = (made.qk == -math.inf).all(-1)[..., None]
    output = expected["output"]
    heads = call.attributes["num_heads"]
    where = rows.expand(*rows.shape[:3], output.shape[2] // heads).transpose(1, 2).flatten(2)
    return {"output": Outcome(output.masked_fill(where, math.nan))}


def bias_of_the_group(call: Call, expected: Mapping[str, Tensor]) -> dict[str, Outcome]:
    bias, beams = call.tensors["attention_bias"], call.tensors["cache_indirection"].shape[1]
    batch = call.tensors["query"].shape[0]
    if bias.shape[0] != 1:
        bias = bias[torch.arange(batch) // beams]
    made = _mha(call, attention_bias=bias)
    return {"output": Outcome(made.output)} | ({"qk": Outcome(made.qk)} if "qk" in expected and made.qk is not None else {})


def _mha(call: Call, **changes: Tensor | bool) -> reference.MhaResult:
    arguments: dict[str, Any] = {**call.tensors, **call.attributes, "output_qk": True, **changes}
    return reference.mha(**arguments)
