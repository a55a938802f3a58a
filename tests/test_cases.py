"""The checked cases of tests/data: field reports (f_...) and com.microsoft::MultiHeadAttention as ONNX Runtime runs it (m_...).

Each case holds inputs, attributes, the expected float64 outputs and a tolerance. They run through the reference and through
the ops. Where this package decides otherwise than the recording, DECIDED says what is expected instead, and why.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import assert_close, call_attention, call_mha, poison_memory
from torch import Tensor

from torch_onnx_attn import reference

DATA = Path(__file__).parent / "data"
INDEX: list[dict[str, Any]] = json.loads((DATA / "cases.json").read_text())
ARRAYS = np.load(DATA / "cases.npz")
Tensors = dict[str, Tensor]

ACCEPTED = [case for case in INDEX if case["expect"] == "ok"]
REFUSED = [case for case in INDEX if case["expect"] == "error"]


def load(case: dict[str, Any], prefix: str) -> Tensors:
    start = f"{case['name']}/{prefix}"
    tensors = {name.removeprefix(start): torch.from_numpy(ARRAYS[name].copy()) for name in ARRAYS.files if name.startswith(start)}
    if case["name"] == "f_bshd_storage_viewed_as_bhsd" and prefix == "in_":  # the point of the case, which a file cannot hold
        tensors = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in tensors.items()}
    return tensors


def attributes(case: dict[str, Any]) -> dict[str, Any]:
    """The recorded ONNX attributes as the ops take them."""
    converted = dict(case["attrs"])
    if "is_causal" in converted:
        converted["is_causal"] = bool(converted["is_causal"])
    if "mask_filter_value" in converted:  # "-inf" is a string in the index
        converted["mask_filter_value"] = float(converted["mask_filter_value"])
    if "unidirectional" in converted:  # ONNX Runtime turns it on for 1 only; a bool has no 2
        converted["unidirectional"] = converted["unidirectional"] == 1
    return converted


# ---------------------------------------------------------------------------------------------------------------------
# Where the recording is not what this package computes


def heads(x: Tensor, num_heads: int) -> Tensor:
    return x.double().unflatten(2, (num_heads, -1)).transpose(1, 2)


def rows_without_nan(inputs: Tensors, recorded: Tensors) -> Tensors:
    assert bool(recorded["output"].isnan().any())
    return {"output": recorded["output"].nan_to_num(0.0)}


def mean_of_visible_values(inputs: Tensors, recorded: Tensors) -> Tensors:
    value, mask, output = heads(inputs["value"], 2), inputs["key_padding_mask"], recorded["output"].clone()
    for entry in range(len(mask)):
        for row in range(mask.shape[1]):
            if not bool((mask[entry, : row + 1] > 0).any()):
                output[entry, row] = value[entry, :, : row + 1].mean(1).flatten()
    assert not torch.equal(output, recorded["output"])
    return {"output": output}


def causal_from_the_bottom_right(inputs: Tensors, recorded: Tensors) -> Tensors:
    q, k, v = (heads(inputs[name], 2) for name in ("query", "key", "value"))
    qk = q @ k.transpose(-1, -2) / 2.0  # head size 4
    shown, output = qk.clone(), torch.zeros_like(q)
    for row in range(3):
        visible = 4 + row  # 6 keys, 3 queries: the last query sees them all
        shown[:, :, row, visible:] = torch.finfo(torch.float32).min
        output[:, :, row] = (torch.softmax(qk[:, :, row, :visible], -1)[..., None, :] @ v[:, :, :visible])[..., 0, :]
    assert not torch.equal(shown, recorded["qk"])
    return {"output": output.transpose(1, 2).flatten(2), "qk": shown}


def bias_of_the_entry_itself(inputs: Tensors, recorded: Tensors) -> Tensors:
    bias, beams, past = inputs["attention_bias"].double(), inputs["cache_indirection"].reshape(4, -1), 5
    group = torch.arange(4) // 2
    qk = recorded["qk"] - bias[group] + bias
    weights, output = torch.softmax(qk, -1), torch.zeros(4, 2, 4, dtype=torch.float64)
    for entry in range(4):
        for row in range(past + 1):
            source = int(group[entry]) * 2 + int(beams[entry, row]) if row < past else entry
            output[entry] += weights[entry, :, 0, row, None] * recorded["present_value"][source, :, row]
    return recorded | {"qk": qk, "output": output.reshape(4, 1, 8)}


DECIDED: dict[str, tuple[str, Callable[[Tensors, Tensors], Tensors]]] = {
    "m_mask_full_inf": ("a row without a finite score is zero, where ONNX Runtime has NaN", rows_without_nan),
    "m_abias_neg_inf_row_nan": ("a row without a finite score is zero, where ONNX Runtime has NaN", rows_without_nan),
    "m_causal_left_pad_lowest": (
        "causality excludes; in ONNX Runtime's CPU kernel it adds the lowest float32, which such a row cannot tell from its padding",
        mean_of_visible_values,
    ),
    "m_causal_l_gt_s": (
        "query s sees key t <= kv_len - q_len + s as on CUDA; ONNX Runtime's CPU kernel counts from the top left and opens the last row",
        causal_from_the_bottom_right,
    ),
    "m_share_beam2_abias_per_batch": (
        "attention_bias of batch size B belongs to the batch entry; ONNX Runtime reads it at entry // beams here",
        bias_of_the_entry_itself,
    ),
}
NO_PRESENT = {  # the op returns present tensors together with past ones, which must have head_size columns
    "m_v_head_differs": "v_head_size differs from head_size",
    "m_bias_v_head_differs": "v_head_size differs from head_size",
}


def expected_outputs(case: dict[str, Any]) -> Tensors:
    recorded = load(case, "out_")
    if case["name"] not in DECIDED:
        return recorded
    return recorded | DECIDED[case["name"]][1](load(case, "in_"), recorded)


def compare(case: dict[str, Any], actual: Tensors, names: list[str]) -> None:
    expected = expected_outputs(case)
    for name in names:
        assert_close(name, actual[name].cpu(), expected[name], case["tol"], case["tol"])


def ids(cases: list[dict[str, Any]]) -> list[str]:
    return [case["name"] for case in cases]


def test_every_decided_case_exists() -> None:
    assert (DECIDED.keys() | NO_PRESENT.keys()) <= {case["name"] for case in ACCEPTED}
    assert len(INDEX) == 93


@pytest.mark.parametrize("case", ACCEPTED, ids=ids(ACCEPTED))
def test_reference(case: dict[str, Any]) -> None:
    inputs = load(case, "in_")
    if case["op"] == "attention":
        result = reference.attention(**inputs, **{"qk_matmul_output_mode": 0} | attributes(case))
    else:
        result = reference.mha(**inputs, **attributes(case), output_qk=True)
    compare(case, result._asdict(), case["outputs"])


@pytest.mark.parametrize("case", ACCEPTED, ids=ids(ACCEPTED))
def test_op(case: dict[str, Any], device: str) -> None:
    inputs = {name: x.to(device) for name, x in load(case, "in_").items()}
    names = list(case["outputs"])
    poison_memory(device, inputs.values())
    if case["op"] == "attention":
        arguments = attributes(case)
        mode = arguments.pop("qk_matmul_output_mode", 0) if "qk_matmul_output" in names else None
        actual = call_attention(inputs, mode, **arguments)
    else:
        if case["name"] in NO_PRESENT or "past_sequence_length" in inputs:
            unavailable = "qk" if "past_sequence_length" in inputs else "present"  # mha.shared returns the output and fills the caches
            names = [name for name in names if not name.startswith(unavailable)]
        if "present_key" in names and "past_key" not in inputs:  # the first step of a cache: a past without rows
            heads_shape = (len(inputs["query"]), case["attrs"]["num_heads"], 0, inputs["query"].shape[2] // case["attrs"]["num_heads"])
            empty = inputs["query"].new_empty(heads_shape)
            inputs |= {"past_key": empty, "past_value": empty.clone()}
        actual = call_mha(inputs, "qk" in names, **attributes(case))
    compare(case, actual, names)


# ---------------------------------------------------------------------------------------------------------------------
# Refused by ONNX Runtime, refused here

REASONS = {
    "m_err_mask_bl_with_past": r"key_padding_mask.*\[2, 5\]",
    "m_err_abias_s1": r"attention_bias.*\[1, 1, 1, 5\]",
    "m_err_bias_short": r"bias.*\[16\].*24",
    "m_err_bias_rank2": r"bias.*\[1, 24\]",
    "m_err_query_only_rank3": r"key.*missing",
    "m_err_bnsh_v_head_differs": r"value.*\[2, 2, 5, 6\]",
    "m_err_past_v_head_differs": r"value.*6",
    "m_err_psl_too_long": r"past_sequence_length.*4",
    "m_err_psl_negative": r"past_sequence_length.*-1",
    "m_err_psl_two": r"past_sequence_length.*\[2\]",
    "m_err_beam_index": r"cache_indirection.*2",
}


@pytest.mark.parametrize("case", REFUSED, ids=ids(REFUSED))
def test_refused(case: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=REASONS[case["name"]]):
        call_mha(load(case, "in_"), **attributes(case))


def test_lowest_filter_swallows_the_scores() -> None:
    """The reference's float32 rounding in one number: without it the fully padded rows would not be the mean of the values."""
    case = next(case for case in INDEX if case["name"] == "m_mask_full_lowest")
    inputs = load(case, "in_")
    output = reference.mha(**inputs, **attributes(case)).output
    mean = inputs["value"].double().mean(1, keepdim=True).expand_as(output)
    assert float((output - mean).abs().max()) < 1e-12
    filter_value = {"mask_filter_value": -1e9}  # float64 logits keep the scores apart here, float32 ones do not
    kept_apart = reference.mha(**inputs, **attributes(case) | filter_value, logits_dtype=torch.float64).output
    swallowed = reference.mha(**inputs, **attributes(case) | filter_value).output
    assert float((swallowed - mean).abs().max()) < 1e-12 < 1e-3 < float((kept_apart - mean).abs().max())
    assert math.isfinite(float(kept_apart.sum()))
