"""`verify` names who is wrong: each implementation in turn is made wrong here, by much and by little."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from model_files import Source, model_of, model_of_node, node_of, node_proto, onnx, save
from torch import Tensor

from torch_onnx_attn.call import Call
from torch_onnx_attn.models import BadInput, NodeResult, judge, verify
from torch_onnx_attn.models.oracles import Answer, ask
from torch_onnx_attn.models.verify import OURS, REFERENCE

pytest.importorskip("onnxruntime")
verifying = importlib.import_module("torch_onnx_attn.models.verify")  # `models.verify` is the function of that name

Spoil = Callable[[str, Any], Any]


def attention_arrays(dtype: Any = np.float32) -> dict[str, Any]:
    source = Source()
    return source.qkv(dtype=dtype) | {"attn_mask": np.where(source.keep(4, 3, 5), 0.5, -np.inf).astype(dtype)}


def judged(op: str, arrays: dict[str, Any], outputs: list[str] | None = None, opset: int = 24, **attributes: Any) -> NodeResult:
    return judge(node_of(op, arrays, outputs, opset, **attributes), arrays)


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[[Spoil, str], None]:
    """Makes one implementation wrong: its outputs go through a function of their names and values."""

    def apply(change: Spoil, who: str) -> None:
        if who == OURS:
            run = Call.run
            monkeypatch.setattr(Call, "run", lambda call: {name: change(name, x) for name, x in run(call).items()})
            return
        real = verifying.ask

        def spoilt(oracle: str, node: Any, arrays: Any) -> Answer:
            answer = real(oracle, node, arrays)
            if oracle != who or answer.outputs is None:
                return answer
            return dataclasses.replace(answer, outputs={name: change(name, np.array(x)) for name, x in answer.outputs.items()})

        monkeypatch.setattr(verifying, "ask", spoilt)

    return apply


# ---------------------------------------------------------------------------------------------------------------------
# Agreement
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("opset", [23, 24, 25])
def test_everybody_agrees_on_an_ordinary_node(dtype: Any, opset: int) -> None:
    result = judged("attention", attention_arrays(dtype), opset=opset, is_causal=1, softcap=2.0)
    assert result.status == "agree" and result.odd_one_out == () and result.verdict == "agree"
    (output,) = result.outputs
    expected = {OURS, "onnx.reference"} | (set() if dtype == ml_dtypes.bfloat16 else {"onnxruntime"})
    assert set(output.deviations) == expected
    assert all(0 < found.units <= found.allowed_units for found in output.deviations.values())
    if dtype == ml_dtypes.bfloat16:
        assert result.refusals["onnxruntime"].startswith("as known: no bfloat16")


def test_everybody_agrees_on_mha_and_on_a_cache_write() -> None:
    arrays = Source().mha() | {"bias": Source(1).normal(96), "key_padding_mask": np.array([3, 5], np.int32)}
    result = judged("mha", arrays, ["output", "present_key", "present_value"], num_heads=4)
    assert result.status == "agree" and set(result.outputs[0].deviations) == {OURS, "onnxruntime"}
    cache = {"past_cache": Source().normal(2, 4, 6, 8), "update": Source().normal(2, 4, 2, 8), "write_indices": np.array([5, 1])}
    result = judged("tensor_scatter", cache, mode="circular")
    assert result.status == "agree" and all(found.ratio == 0 for found in result.outputs[0].deviations.values())


def test_a_long_reference_is_split_and_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = attention_arrays() | Source(5).past()
    arrays["attn_mask"] = Source(6).keep(2, 1, 3, 9)
    call = verifying.call_of(node_of("attention", arrays, ["Y", "present_key", "qk_matmul_output"], qk_matmul_output_mode=2), arrays)
    whole, split = call.expected(), dataclasses.replace(call)
    monkeypatch.setattr("torch_onnx_attn.call._MOST_SCORES", 0)
    for name, tensor in split.expected().items():
        torch.testing.assert_close(tensor, whole[name], rtol=1e-13, atol=1e-13)
    arrays = {
        "Q": Source().normal(2, 3, 32),
        "K": Source(1).normal(2, 5, 16),
        "V": Source(2).normal(2, 5, 24),
        "nonpad_kv_seqlen": np.array([2, 5]),
    }
    call = verifying.call_of(node_of("attention", arrays, q_num_heads=4, kv_num_heads=2), arrays)
    monkeypatch.undo()
    whole = call.expected()
    monkeypatch.setattr("torch_onnx_attn.call._MOST_SCORES", 0)
    torch.testing.assert_close(dataclasses.replace(call).expected()["Y"], whole["Y"], rtol=1e-13, atol=1e-13)


# ---------------------------------------------------------------------------------------------------------------------
# The odd one out
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", [OURS, "onnxruntime", "onnx.reference"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_odd_one_out_is_named(spoil: Any, who: str, dtype: Any) -> None:
    def one_element(name: str, x: Any) -> Any:
        x[0, 1, 2, 3] += 0.25
        return x

    spoil(one_element, who)
    result = judged("attention", attention_arrays(dtype))
    assert result.status == "differs" and result.odd_one_out == (who,) and result.verdict == f"{who} differs in Y"
    assert result.outputs[0].deviations[who].where == (0, 1, 2, 3)
    assert result.outputs[0].deviations[who].absolute == pytest.approx(0.25, rel=0.02)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_nan_is_not_overlooked(spoil: Any, value: float) -> None:
    def spoilt(name: str, x: Any) -> Any:
        x[1, 0, 0, 0] = value
        return x

    spoil(spoilt, "onnxruntime")
    result = judged("attention", attention_arrays())
    assert result.status == "differs" and result.odd_one_out == ("onnxruntime",) and result.worst == math.inf


def test_a_wrong_shape_is_a_deviation(spoil: Any) -> None:
    spoil(lambda name, x: x[:, :, :1], "onnxruntime")
    assert judged("attention", attention_arrays()).odd_one_out == ("onnxruntime",)


@pytest.mark.parametrize("who", [OURS, "onnxruntime"])
def test_noise_beyond_what_rounding_explains_is_a_deviation(spoil: Any, who: str) -> None:
    """Twice what is allowed is seen, half of it is not."""
    arrays = attention_arrays()
    allowed = judged("attention", arrays).outputs[0].deviations[who]
    unit = 2**-24 * np.abs(arrays["V"]).max()
    assert allowed.allowed_units < 200

    def noisy(size: float) -> Spoil:
        return lambda name, x: x + size

    spoil(noisy(0.2 * allowed.allowed_units * unit), who)
    assert judged("attention", arrays).status == "agree"
    spoil(noisy(4 * allowed.allowed_units * unit), who)
    assert judged("attention", arrays).odd_one_out == (who,)


def test_a_row_with_a_huge_bias_does_not_excuse_the_others(spoil: Any) -> None:
    arrays = Source().qkv()
    arrays["attn_mask"] = np.zeros((3, 5), np.float32)
    arrays["attn_mask"][0] = -1e9
    assert judged("attention", arrays).status == "agree"

    def in_the_second_row(name: str, x: Any) -> Any:
        x[0, 0, 1] += 1e-3
        return x

    spoil(in_the_second_row, OURS)
    assert judged("attention", arrays).odd_one_out == (OURS,)


def test_if_all_others_agree_the_reference_is_the_odd_one(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Call.expected
    monkeypatch.setattr(Call, "expected", lambda call: {name: x + 0.5 for name, x in right(call).items()})
    result = judged("attention", attention_arrays())
    assert result.status == "differs" and result.odd_one_out == (REFERENCE,)


def test_a_node_that_is_not_valid_is_refused_with_the_reason() -> None:
    result = judged("attention", Source().qkv() | {"attn_mask": np.ones((3, 7), bool)})
    assert result.status == "refused" and result.odd_one_out == (OURS,) and "attn_mask" in result.verdict


def test_results_differ_between_devices_of_the_op_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """`device` is where our op runs, and nothing else runs there."""
    seen: list[str] = []
    moved = Call.to
    monkeypatch.setattr(Call, "to", lambda call, device: (seen.append(str(device)), moved(call, "cpu"))[1])
    node, arrays = node_of("attention", attention_arrays()), attention_arrays()
    assert judge(node, arrays, "cpu").status == "agree" and seen == ["cpu"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_our_op_on_cuda(dtype: Any) -> None:
    arrays = attention_arrays(dtype)
    assert judge(node_of("attention", arrays, softcap=2.0), arrays, "cuda").status == "agree"
    mha = Source().mha(dtype=dtype) | {"bias": Source(1).normal(96, dtype=dtype)}
    assert judge(node_of("mha", mha, num_heads=4), mha, "cuda").status == "agree"


# ---------------------------------------------------------------------------------------------------------------------
# Whole models
# ---------------------------------------------------------------------------------------------------------------------


def two_layers() -> tuple[Any, dict[str, Any]]:
    """Two MultiHeadAttention nodes with a product in between, so that the second sees intermediate values."""
    source = Source()
    weight = onnx.numpy_helper.from_array(source.normal(32, 32) / 6, "weight")
    first = node_proto("mha", ["query", "key", "value"], ["output"], name="first", num_heads=4)
    product = onnx.helper.make_node("MatMul", ["output", "weight"], ["hidden"])
    second = onnx.helper.make_node(
        "MultiHeadAttention", ["hidden", "key", "value"], ["Z"], name="second", domain="com.microsoft", num_heads=4
    )
    arrays = source.mha()
    return model_of([first, product, second], arrays, ["Z"], initializer=[weight]), arrays


def test_nodes_are_checked_on_the_values_they_see(tmp_path: Path) -> None:
    model, arrays = two_layers()
    result = verify(save(model, tmp_path), arrays)
    assert result.runner == "ONNX Runtime" and result.made_up == {}
    assert [(node.node, node.status) for node in result.nodes] == [("first", "agree"), ("second", "agree")]
    seen = verifying.observe(model, verifying.find_nodes(model), arrays, tmp_path).seen
    # What ONNX Runtime computes for the first node, through the product, is what the second one saw.
    first = ask("onnxruntime", verifying.find_nodes(model)[0], arrays).outputs
    assert first is not None
    weight = onnx.numpy_helper.to_array(model.graph.initializer[0])
    np.testing.assert_allclose(seen["second"][0]["query"], first["output"] @ weight, atol=1e-5)


def test_without_onnxruntime_onnx_reference_runs_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, arrays = two_layers()
    path = save(model, tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    monkeypatch.setattr("torch_onnx_attn.models.oracles.installed_version", lambda name: None if name == "onnxruntime" else "1.23.2")
    result = verify(path, arrays)
    assert result.runner == "onnx.reference" and [node.status for node in result.nodes] == ["agree", "agree"]
    assert result.nodes[0].refusals["onnxruntime"] == "onnxruntime is not installed"


def test_a_model_that_onnxruntime_refuses_is_run_by_onnx_reference(tmp_path: Path) -> None:
    arrays = attention_arrays(ml_dtypes.bfloat16)
    first = node_proto("attention", arrays, ["Y"], name="first")
    second = onnx.helper.make_node("Attention", ["Y", "K", "V"], ["Z"], name="second")
    result = verify(save(model_of([first, second], arrays, ["Z"]), tmp_path), arrays)
    assert result.runner == "onnx.reference" and [node.status for node in result.nodes] == ["agree", "agree"]


def test_only_some_nodes(tmp_path: Path) -> None:
    model, arrays = two_layers()
    path = save(model, tmp_path)
    assert [node.node for node in verify(path, arrays, only=["second"]).nodes] == ["second"]
    with pytest.raises(BadInput, match="no attention node 'third'; there are first, second"):
        verify(path, arrays, only=["third"])


def test_progress_is_told(tmp_path: Path) -> None:
    model, arrays = two_layers()
    told: list[tuple[str, int, int]] = []
    verify(save(model, tmp_path), arrays, progress=lambda *what: told.append(what))
    assert [text for text, _, _ in told] == ["running the model", "first", "second", ""] and told[-1][1:] == (3, 3)


# ---------------------------------------------------------------------------------------------------------------------
# Inputs
# ---------------------------------------------------------------------------------------------------------------------


def symbolic(tmp_path: Path) -> Path:
    arrays = Source().qkv() | {"attn_mask": Source().keep(3, 5), "nonpad_kv_seqlen": np.array([3, 5])}
    model = model_of_node("attention", arrays)
    for entry, dims in zip(
        model.graph.input,
        (("batch", 4, "rows", 8), ("batch", 2, "keys", 8), ("batch", 2, "keys", 8), ("rows", "keys"), ("batch",)),
        strict=True,
    ):
        for dim, name in zip(entry.type.tensor_type.shape.dim, dims, strict=True):
            if isinstance(name, str):
                dim.dim_param = name
    return save(model, tmp_path)


def test_inputs_are_made_up_from_sizes(tmp_path: Path) -> None:
    path = symbolic(tmp_path)
    result = verify(path)
    assert result.made_up["Q"] == "float32[2, 4, 8, 8]" and result.made_up["attn_mask"] == "bool[8, 8]"
    assert result.nodes[0].status == "agree"
    result = verify(path, sizes={"rows": 3, "keys": 11, "batch": 1})
    assert result.made_up["K"] == "float32[1, 2, 11, 8]" and result.made_up["nonpad_kv_seqlen"] == "int64[1]"
    assert verify(path, seed=1).nodes[0].outputs[0].deviations[OURS] != verify(path, seed=2).nodes[0].outputs[0].deviations[OURS]
    assert verify(path, seed=1) == verify(path, seed=1)
    with pytest.raises(BadInput, match="--dim row: no input has such a dimension; there are batch, keys, rows"):
        verify(path, sizes={"row": 3})


def test_given_inputs_decide_the_sizes_of_the_others(tmp_path: Path) -> None:
    path = symbolic(tmp_path)
    np.savez(tmp_path / "some.npz", Q=Source().normal(3, 4, 2, 8))
    result = verify(path, tmp_path / "some.npz")
    assert "Q" not in result.made_up and result.made_up["attn_mask"] == "bool[2, 8]" and result.made_up["V"] == "float32[3, 2, 8, 8]"


@pytest.mark.parametrize(
    "arrays, reason",
    [
        ({"X": np.zeros(2)}, "X is no input of the model; its inputs are Q, K, V"),
        ({"Q": np.zeros((2, 4, 3, 8))}, "Q is float64, but the model takes float32"),
        ({"Q": np.zeros((2, 4, 3), np.float32)}, r"Q has shape \[2, 4, 3\], but the model takes"),
        ({"Q": np.zeros((2, 5, 3, 8), np.float32)}, r"Q has shape \[2, 5, 3, 8\]"),
    ],
)
def test_arrays_that_do_not_fit(tmp_path: Path, arrays: dict[str, Any], reason: str) -> None:
    np.savez(tmp_path / "inputs.npz", **arrays)
    with pytest.raises(BadInput, match=reason):
        verify(symbolic(tmp_path), tmp_path / "inputs.npz")


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04"])
def test_a_file_that_is_no_npz(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "inputs.npz").write_bytes(content)
    with pytest.raises(BadInput, match=r"is not an \.npz file"):
        verify(symbolic(tmp_path), tmp_path / "inputs.npz")
    with pytest.raises(BadInput, match="there is no such file"):
        verify(symbolic(tmp_path), tmp_path / "nothing.npz")


def test_bfloat16_arrays_survive_npz(tmp_path: Path) -> None:
    arrays = attention_arrays(ml_dtypes.bfloat16)
    np.savez(tmp_path / "inputs.npz", **arrays)
    result = verify(save(model_of_node("attention", arrays), tmp_path), tmp_path / "inputs.npz")
    assert result.made_up == {} and result.nodes[0].status == "agree"


def test_a_model_that_does_not_run_says_with_which_inputs(tmp_path: Path) -> None:
    model, arrays = two_layers()
    for dim in model.graph.input[1].type.tensor_type.shape.dim:
        dim.dim_param = "any"
    wrong = arrays | {"key": arrays["key"][:, :, :31]}
    with pytest.raises(BadInput, match=r"does not run with inputs query \[2, 3, 32\].*; ONNX Runtime: .*; onnx.reference: "):
        verify(save(model, tmp_path), wrong)


def test_tensors_as_inputs_of_a_sequence_model_are_refused(tmp_path: Path) -> None:
    model = model_of_node("attention", Source().qkv())
    kind = onnx.helper.make_sequence_type_proto(onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, None))
    model.graph.input.append(onnx.helper.make_value_info("list", kind))
    with pytest.raises(BadInput, match="input list: is no tensor"):
        verify(save(model, tmp_path))


def test_expected_is_not_what_the_op_gives() -> None:
    """The judge shares nothing with the op: a broken op does not move it."""
    arrays = attention_arrays()
    call = verifying.call_of(node_of("attention", arrays), arrays)
    expected: dict[str, Tensor] = call.expected()
    assert expected["Y"].dtype == torch.float64 and not torch.equal(expected["Y"], call.run()["Y"].double())
