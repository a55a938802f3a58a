"""The node cases that the onnx package generates for Attention and TensorScatter, through the reference and the ops; and the
defects of other implementations that keep them from being our oracle, each pinned so that we hear when it is mended."""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from cases import assert_close, assert_same_bits, call_attention, poison_memory, unit_roundoff
from torch import Tensor

from torch_onnx_attn import reference

onnx = pytest.importorskip("onnx", minversion="1.23")


def to_torch(array: np.ndarray) -> Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.astype(np.float32)).bfloat16()
    return torch.from_numpy(np.array(array))


@functools.cache
def node_cases(op_type: str) -> dict[str, Any]:
    """The operator's cases by name, the expanded forms left out."""
    from onnx.backend.test.case.node import collect_testcases

    def found() -> dict[str, Any]:
        cases = collect_testcases(op_type)
        return {c.name: c for c in cases if c.model.graph.node[0].op_type == op_type and len(c.model.graph.node) == 1}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other operators' data is made on the way
        if not found():  # onnx makes cases as it is imported, and only those of the operator that was asked for first
            module = importlib.import_module(f"onnx.backend.test.case.node.{op_type.lower()}")
            for name, export in vars(getattr(module, op_type)).items():
                if name.startswith("export"):
                    np.random.seed(0)  # as onnx does
                    export.__func__()
        return found()


def unpack(case: Any) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
    """Inputs, attributes and expected outputs by name."""
    node = case.model.graph.node[0]
    arrays_in, arrays_out = case.data_sets[0]
    inputs = dict(zip([name for name in node.input if name], map(to_torch, arrays_in), strict=True))
    outputs = dict(zip([name for name in node.output if name], map(to_torch, arrays_out), strict=True))
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    if "is_causal" in attributes:
        attributes["is_causal"] = bool(attributes["is_causal"])
    if "mode" in attributes:
        attributes["circular"] = attributes.pop("mode") == b"circular"
    return inputs, attributes, outputs


ATTENTION = sorted(node_cases("Attention"))
SCATTER = sorted(node_cases("TensorScatter"))


def compare(actual: dict[str, Tensor], expected: dict[str, Tensor], rtol: float) -> None:
    """Within the case's own relative tolerance; absolute like it for values of order 1, and two roundings of a 16-bit type,
    as numpy rounds the scaled inputs, the scores and the weights to it."""
    for name, value in expected.items():
        absolute = max(1e-6, 4 * unit_roundoff(value.dtype) if value.element_size() == 2 else 0.0)
        assert_close(name, actual[name].cpu(), value.double(), absolute, rtol)


def test_all_cases_were_found() -> None:
    assert (len(ATTENTION), len(SCATTER)) == (93, 3), onnx.__version__


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_reference(name: str) -> None:
    inputs, attributes, expected = unpack(node_cases("Attention")[name])
    result = reference.attention(**inputs, **{"qk_matmul_output_mode": 0} | attributes)._asdict()
    compare({output: result[output].to(value.dtype) for output, value in expected.items()}, expected, 1e-3)


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_op(name: str, device: str) -> None:
    inputs, attributes, expected = unpack(node_cases("Attention")[name])
    inputs = {key: value.to(device) for key, value in inputs.items()}
    mode = attributes.pop("qk_matmul_output_mode", 0) if "qk_matmul_output" in expected else None
    poison_memory(device, inputs.values())
    actual = call_attention(inputs, mode, **attributes)
    for output, value in expected.items():
        assert actual[output].dtype == value.dtype
    compare(actual, expected, 1e-3)


@pytest.mark.parametrize("name", SCATTER)
def test_scatter(name: str, device: str) -> None:
    inputs, attributes, expected = unpack(node_cases("TensorScatter")[name])
    assert_same_bits("reference", reference.tensor_scatter(**inputs, **attributes), expected["present_cache"])
    inputs = {key: value.to(device) for key, value in inputs.items()}
    present = torch.ops.onnx_attn.tensor_scatter(**inputs, **attributes)
    assert_same_bits("present_cache", present.cpu(), expected["present_cache"])


# ---------------------------------------------------------------------------------------------------------------------
# Known defects of onnx.reference (seen in 1.23.1 and 1.23.2). A failure here says that a defect is gone: drop its test, and
# what is said about it elsewhere.


def run_onnx_reference(outputs: list[str], inputs: dict[str, np.ndarray], opset: int = 23, **attributes: Any) -> list[np.ndarray]:
    from onnx.reference import ReferenceEvaluator

    order = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
    names = [name if name in inputs else "" for name in order]
    while not names[-1]:
        names.pop()
    node = onnx.helper.make_node("Attention", names, outputs, **attributes)
    element = onnx.helper.np_dtype_to_tensor_dtype
    graph = onnx.helper.make_graph(
        [node],
        "attention",
        [onnx.helper.make_tensor_value_info(name, element(value.dtype), None) for name, value in inputs.items()],
        [onnx.helper.make_tensor_value_info(name, element(inputs["Q"].dtype), None) for name in outputs if name],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    return ReferenceEvaluator(model).run(None, inputs)


def small_inputs(kv_len: int = 3) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    sizes = {"Q": (1, 1, 2, 4), "K": (1, 1, kv_len, 4), "V": (1, 1, kv_len, 4)}
    return {name: generator.standard_normal(size).astype(np.float32) for name, size in sizes.items()}


def test_onnx_reference_caps_the_raw_scores() -> None:
    """qk_matmul_output_mode 0 is the raw product by the text, the function body and ONNX Runtime; numpy's is softcapped."""
    inputs = small_inputs()
    _, scores = run_onnx_reference(["Y", "", "", "qk"], inputs, softcap=0.5, qk_matmul_output_mode=0)
    tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
    raw, capped = (reference.attention(**tensors, softcap=0.5, qk_matmul_output_mode=mode).qk_matmul_output for mode in (0, 1))
    np.testing.assert_allclose(scores, capped, rtol=1e-5)
    assert float((raw - capped).abs().max()) > 0.1


def test_onnx_reference_spreads_nan_from_the_cache_tail() -> None:
    """Rows at or past nonpad_kv_seqlen are padding, but numpy multiplies their NaN by a zero weight."""
    inputs = small_inputs()
    inputs["V"][:, :, 2:] = np.nan
    (Y,) = run_onnx_reference(["Y"], inputs | {"nonpad_kv_seqlen": np.array([2], np.int64)}, opset=24)
    assert np.isnan(Y).all()


def test_onnx_reference_cannot_do_without_keys() -> None:
    """No keys at all: every row is empty, so zero; numpy has no maximum of nothing."""
    with pytest.raises(ValueError, match="zero-size array"):
        run_onnx_reference(["Y"], small_inputs(kv_len=0))


def test_onnx_reference_repeats_the_first_row_of_causality() -> None:
    """is_causal beside a mask that broadcasts over queries: numpy gives every query what query 0 sees, and takes no rank-1 mask
    at all. The function body (ONNX Runtime, opset 25) composes the two."""
    inputs = small_inputs()
    tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
    (Y,) = run_onnx_reference(["Y"], inputs | {"attn_mask": np.zeros((1, 3), np.float32)}, opset=25, is_causal=1)
    np.testing.assert_allclose(Y[0, 0], np.broadcast_to(inputs["V"][0, 0, 0], (2, 4)), rtol=1e-5)
    ours = reference.attention(**tensors, attn_mask=torch.zeros(1, 3), is_causal=True).Y
    assert_close("Y", ours, reference.attention(**tensors, is_causal=True).Y, 1e-12)
    assert float((torch.from_numpy(Y) - ours).abs().max()) > 0.1
    with pytest.raises(ValueError, match="not enough values to unpack"):
        run_onnx_reference(["Y"], inputs | {"attn_mask": np.zeros(3, np.float32)}, opset=25, is_causal=1)


def test_onnx_reference_overflows_in_float16() -> None:
    """q.k = 80000 at scale 1: float32 scores give a plain softmax; numpy's float16 ones give NaN."""
    inputs = {
        "Q": np.full((1, 1, 1, 8), 100, np.float16),
        "K": np.full((1, 1, 2, 8), 100, np.float16),
        "V": np.ones((1, 1, 2, 8), np.float16),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (Y,) = run_onnx_reference(["Y"], inputs, scale=1.0)
    assert np.isnan(Y).all()
    tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
    assert bool((reference.attention(**tensors, scale=1.0).Y == 1).all())


# Known defects of torch.onnx.ops.attention (seen in torch 2.11 and 2.13): why this package does not defer to it.


def torch_attention(**arguments: Any) -> tuple[Tensor, ...]:
    return pytest.importorskip("torch.onnx.ops").attention(**arguments)


def test_torch_onnx_attention_ignores_the_past_in_causality() -> None:
    tensors = {name: torch.from_numpy(value) for name, value in small_inputs(2).items()}
    past = {"past_key": torch.zeros(1, 1, 3, 4), "past_value": torch.ones(1, 1, 3, 4)}
    Y = torch_attention(**tensors, **past, is_causal=True)[0]
    torch.testing.assert_close(Y[0, 0, 0], torch.ones(4))  # row 0 saw past row 0 alone
    assert float((reference.attention(**tensors, **past, is_causal=True).Y[0, 0, 0] - 1).abs().max()) > 0.01


def test_torch_onnx_attention_has_nan_in_empty_rows() -> None:
    tensors = {name: torch.from_numpy(value) for name, value in small_inputs().items()}
    mask = torch.tensor([[False, False, False], [True, True, True]])
    Y = torch_attention(**tensors, attn_mask=mask, qk_matmul_output_mode=3)[0]
    assert bool(Y[0, 0, 0].isnan().all())
    assert bool((reference.attention(**tensors, attn_mask=mask).Y[0, 0, 0] == 0).all())


def test_torch_onnx_attention_does_not_compose_causality_with_a_mask() -> None:
    tensors = {name: torch.from_numpy(value) for name, value in small_inputs().items()}
    with pytest.raises(RuntimeError, match="is_causal"):
        torch_attention(**tensors, attn_mask=torch.ones(2, 3, dtype=torch.bool), is_causal=True, qk_matmul_output_mode=3)
