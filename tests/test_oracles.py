"""The reference against oracles that other people wrote: onnx's numpy evaluator and ONNX Runtime's CPU kernel.

Both run over the covering arrays of test_combinations, kept away from what each of them is known to get wrong or not to support.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from cases import INF, Case, MhaCase, assert_close, largest, make_inputs, make_mha_inputs
from test_combinations import ATTENTION_ROWS, MHA_ROWS, Row, attention_case, mha_case

from torch_onnx_attn import reference

onnx = pytest.importorskip("onnx", minversion="1.23")


def run_model(domain: str, op_type: str, order: list[str], outputs: list[str], inputs: dict[str, Any], attributes: dict[str, Any]) -> Any:
    """A model of one node; inputs that are missing in the middle have empty names."""
    names = [name if name in inputs else "" for name in order]
    while not names[-1]:
        names.pop()
    element = onnx.helper.np_dtype_to_tensor_dtype
    node = onnx.helper.make_node(op_type, names, outputs, domain=domain, **attributes)
    graph = onnx.helper.make_graph(
        [node],
        op_type,
        [onnx.helper.make_tensor_value_info(name, element(value.dtype), value.shape) for name, value in inputs.items()],
        [onnx.helper.make_tensor_value_info(name, element(inputs[order[0]].dtype), None) for name in outputs if name],
    )
    opsets = [onnx.helper.make_opsetid("", 25)] + ([onnx.helper.make_opsetid(domain, 1)] if domain else [])
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)


# ---------------------------------------------------------------------------------------------------------------------
# ai.onnx::Attention: onnx.reference in float64


def case_for_onnx(row: Row) -> Case:
    """Out of numpy's reach: no keys or queries, the raw product with softcap, causality beside a mask without a query axis, and
    sums in another type than the inputs'."""
    case = attention_case(row, torch.float64)
    changes: Row = {"v_dtype": None, "q_len": max(case.q_len, 1), "kv_len": max(case.kv_len, 1), "softmax_precision": None, "lse": False}
    if case.qk_matmul_output_mode == 0:
        changes["softcap"] = 0.0
    if case.is_causal and "q" not in case.mask_axes:
        changes["mask_axes"] = "qk"
    if case.scale == 0.3:
        changes["scale"] = 0.25  # numpy takes the square root of a float32 attribute in float32
    if case.mask in ("float16", "float32"):
        changes["mask"] = "same"  # numpy adds them in the mask's type
    return Case(**vars(case) | changes)


@pytest.mark.parametrize("row", ATTENTION_ROWS, ids=range(len(ATTENTION_ROWS)))
def test_attention_agrees_with_onnx(row: Row) -> None:
    from onnx.reference import ReferenceEvaluator

    case = case_for_onnx(row)
    inputs = {name: x.nan_to_num(3.0, 3.0, 3.0) if name in ("K", "V") else x for name, x in make_inputs(case).items()}
    names = ["Y"]
    if case.past is not None:
        names += ["present_key", "present_value"]
    if case.qk_matmul_output_mode is not None:
        names += [""] * (3 - len(names)) + ["qk_matmul_output"]
    attributes = case.attributes() | ({"qk_matmul_output_mode": case.qk_matmul_output_mode} if "qk_matmul_output" in names else {})
    attributes = {name: int(value) if isinstance(value, bool) else value for name, value in attributes.items()}
    arrays = {name: x.numpy() for name, x in inputs.items()}
    order = ["Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = ReferenceEvaluator(run_model("", "Attention", order, names, arrays, attributes)).run(None, arrays)
    # ONNX attributes are float32 numbers.
    single = {name: float(np.float32(value)) if isinstance(value, float) else value for name, value in case.attributes().items()}
    ours = reference.attention(**inputs, **single, qk_matmul_output_mode=case.qk_matmul_output_mode)._asdict()
    for name, value in zip([name for name in names if name], theirs, strict=True):
        assert_close(name, torch.from_numpy(value), ours[name], 1e-12 * max(1.0, largest(ours[name])), 1e-11)


# ---------------------------------------------------------------------------------------------------------------------
# com.microsoft::MultiHeadAttention: ONNX Runtime on the CPU, float32


def case_for_onnxruntime(row: Row) -> MhaCase:
    """Out of its CPU kernel's reach: packed layouts. Its own way: causality where lengths differ, or beside the lowest filters."""
    case = mha_case(row, torch.float32)
    changes: Row = {"beams": None, "capacity": None}
    if case.layout.startswith("packed"):
        changes["layout"] = "bsnh"
    if case.unidirectional and (case.q_len != case.kv_len or case.mask_filter_value < -1e30):
        changes["unidirectional"] = False
    if case.mask is not None:
        changes["mask_dtype"] = torch.int32
    if case.past is not None:
        changes["qk"] = True  # without its present outputs the past is misread there
    return MhaCase(**vars(case) | changes)


@pytest.mark.parametrize("row", MHA_ROWS, ids=range(len(MHA_ROWS)))
def test_mha_agrees_with_onnxruntime(row: Row) -> None:
    runtime = pytest.importorskip("onnxruntime")
    case = case_for_onnxruntime(row)
    inputs = make_mha_inputs(case)
    names = ["output", "present_key", "present_value", "qk"]
    order = ["query", "key", "value", "bias", "key_padding_mask", "attention_bias", "past_key", "past_value"]
    arrays = {name: x.numpy() for name, x in inputs.items()}
    attributes = {name: int(value) if isinstance(value, bool) else value for name, value in case.attributes().items()}
    model = run_model("com.microsoft", "MultiHeadAttention", order, names, arrays, attributes)
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    theirs = session.run(None, arrays)
    ours = reference.mha(**inputs, **case.attributes(), output_qk=True)
    # Sums of float32 on their side; a row of fully masked keys carries the rounding of its filter, 10000 * 2^-24.
    masked_entirely = 1e-3 if case.mask is not None and case.mask_filter_value == -10000.0 else 0.0
    value = max(1.0, largest(ours.present_value))
    score = 1e-5 * math.sqrt(case.head_size)
    assert_close("output", torch.from_numpy(theirs[0]).nan_to_num(0.0), ours.output, value * (1e-5 + 2 * score + 2 * masked_entirely))
    assert_close("present_key", torch.from_numpy(theirs[1]), ours.present_key, 1e-6)
    assert_close("present_value", torch.from_numpy(theirs[2]), ours.present_value, 1e-6)
    assert ours.qk is not None
    assert_close("qk", torch.from_numpy(theirs[3]), ours.qk, 10 * score, 1e-5)
    if case.mask_filter_value != -INF:
        assert not np.isnan(theirs[0]).any()
