"""One call kept in a file and run again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torch_onnx_attn
from torch_onnx_attn.bad_input import BadInput
from torch_onnx_attn.record import load, record, replay

ops = torch.ops.onnx_attn


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def shared_buffer_call() -> None:
    x = normal(2, 3, 32)
    past = {"past_key": normal(2, 4, 9, 8), "past_value": normal(2, 4, 9, 8)}
    torch_onnx_attn.mha(x, x, x, normal(96), **past, past_sequence_length=torch.tensor([4], dtype=torch.int32), num_heads=4)


def cached_call() -> None:
    caches = torch.zeros(2, 2, 9, 16), torch.zeros(2, 2, 9, 16)
    torch_onnx_attn.attention_cached(
        normal(2, 1, 64), normal(2, 1, 32), normal(2, 1, 32), *caches, torch.tensor([4, 0]), q_num_heads=4, kv_num_heads=2
    )


CALLS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "attention": (lambda: torch_onnx_attn.attention(*[normal(2, 4, 5, 16)] * 3, is_causal=True, softcap=2.0), ("Y",)),
    "attention.kv": (
        lambda: torch_onnx_attn.attention(
            *[normal(2, 4, 5, 16, dtype=torch.bfloat16)] * 3, None, *[normal(2, 4, 3, 16, dtype=torch.bfloat16)] * 2
        ),
        ("Y", "present_key", "present_value"),
    ),
    "attention.kv_qk": (
        lambda: torch_onnx_attn.attention(
            *[normal(2, 4, 5, 16)] * 3, past_key=normal(2, 4, 3, 16), past_value=normal(2, 4, 3, 16), qk_matmul_output_mode=3
        ),
        ("Y", "present_key", "present_value", "qk_matmul_output"),
    ),
    "attention.lse": (lambda: ops.attention.lse(*[normal(2, 4, 5, 16, dtype=torch.float16)] * 3, return_lse=True), ("Y", "lse")),
    "attention_cached": (cached_call, ("Y", "key_cache", "value_cache")),
    "mha": (lambda: torch_onnx_attn.mha(*[normal(2, 5, 32)] * 3, num_heads=4, unidirectional=True, output_qk=True), ("output", "qk")),
    "mha.shared": (shared_buffer_call, ("output", "present_key", "present_value")),
    "tensor_scatter": (
        lambda: torch_onnx_attn.tensor_scatter(normal(2, 4, 9, 8), normal(2, 4, 3, 8), torch.tensor([8, 0]), circular=True),
        ("present_cache",),
    ),
    "tensor_scatter_": (
        lambda: torch_onnx_attn.tensor_scatter_(normal(2, 9, 8), normal(2, 3, 8), torch.tensor([6, 0]), axis=1),
        ("present_cache",),
    ),
    "valid_kv_length": (lambda: torch_onnx_attn.valid_kv_length(torch.tensor([[True, True, False]])), ("lengths",)),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_op_is_recorded_and_replayed(tmp_path: Path, name: str) -> None:
    make, outputs = CALLS[name]
    with record(tmp_path / "call.npz") as recorder:
        make()
    assert recorder.saved and len(recorder.calls) == 1 and recorder.calls[0].startswith(name.partition(".")[0])
    recorded = load(tmp_path / "call.npz")
    assert recorded.call.outputs == outputs and recorded.origin["device"] == "cpu" and recorded.origin["torch"] == torch.__version__
    replayed = replay(tmp_path / "call.npz", repeats=2)
    assert replayed.agrees and replayed.same_bits and replayed.milliseconds > 0
    assert set(replayed.to_reference) == set(outputs)
    assert (replayed.plan is None) == (name.startswith("tensor_scatter") or name == "valid_kv_length")
    if replayed.plan is not None:
        assert replayed.plan.kernel == "cpu"


def test_what_the_op_writes_is_kept_as_it_was_before(tmp_path: Path) -> None:
    cache, rows = torch.zeros(2, 9, 8), normal(2, 3, 8)
    with record(tmp_path / "call.npz"):
        torch_onnx_attn.tensor_scatter_(cache, rows, torch.tensor([6, 0]), axis=1)
    recorded = load(tmp_path / "call.npz")
    assert not recorded.call.tensors["past_cache"].any()
    assert torch.equal(recorded.outputs["present_cache"], cache) and cache[0, 6:].equal(rows[0])


def test_strides_are_part_of_a_call(tmp_path: Path) -> None:
    Q = normal(2, 5, 4, 16).transpose(1, 2)
    K = normal(2, 1, 9, 16).expand(2, 4, 9, 16)
    V = normal(2, 4, 9, 40)[..., 8:24]
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool).expand(2, 4, 5, 9)
    with record(tmp_path / "call.npz"):
        torch_onnx_attn.attention(Q, K, V, mask)
    tensors = load(tmp_path / "call.npz").call.tensors
    for name, original in (("Q", Q), ("K", K), ("V", V), ("attn_mask", mask)):
        assert tensors[name].stride() == original.stride() and torch.equal(tensors[name], original), name
    assert replay(tmp_path / "call.npz", repeats=1).same_bits


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_type(tmp_path: Path, dtype: torch.dtype) -> None:
    Q = normal(2, 4, 5, 16, dtype=dtype)
    with record(tmp_path / "call.npz"):
        Y = torch_onnx_attn.attention(Q, Q, Q).Y
    recorded = load(tmp_path / "call.npz")
    assert torch.equal(recorded.call.tensors["Q"], Q) and torch.equal(recorded.outputs["Y"], Y)
    assert replay(tmp_path / "call.npz", repeats=1).same_bits


def test_one_of_several_calls(tmp_path: Path) -> None:
    Q = normal(1, 2, 3, 8)

    def work() -> None:
        for softcap in (1.0, 2.0, 3.0):
            torch_onnx_attn.attention(Q, Q, Q, softcap=softcap)

    with record(tmp_path / "call.npz", call=1) as recorder:
        work()
    assert load(tmp_path / "call.npz").call.attributes["softcap"] == 2.0 and len(recorder.calls) == 3
    with record(None) as recorder:
        work()
    assert not recorder.saved and "softcap=3.0" in recorder.calls[2] and "Q=float32[1, 2, 3, 8]" in recorder.calls[2]
    with record(tmp_path / "other.npz", call=3) as recorder:
        work()
    assert not recorder.saved and not (tmp_path / "other.npz").exists()
    with pytest.raises(BadInput, match="call: is -1"), record(None, -1):
        pass


def test_calls_inside_modules_and_inference_mode(tmp_path: Path) -> None:
    layer = torch.nn.Linear(16, 16)
    Q = normal(1, 2, 3, 16)
    with record(tmp_path / "call.npz") as recorder, torch.inference_mode():
        torch_onnx_attn.attention(layer(Q), Q, Q)
    assert recorder.saved and replay(tmp_path / "call.npz", repeats=1).agrees
    with record(tmp_path / "call.npz") as recorder:  # with a gradient on its way
        Y = torch_onnx_attn.attention(layer(Q), Q, Q).Y
    assert Y.requires_grad and len(recorder.calls) == 1 and recorder.saved


def test_calls_in_compiled_functions(tmp_path: Path) -> None:
    Q = normal(1, 2, 3, 16)
    compiled = torch.compile(lambda q: torch_onnx_attn.attention(q, q, q).Y + 1, backend="aot_eager", fullgraph=True)
    before = compiled(Q)
    with record(tmp_path / "call.npz") as recorder:
        after = compiled(Q)
    assert recorder.saved and len(recorder.calls) == 1 and torch.equal(before, after)
    assert torch.equal(load(tmp_path / "call.npz").outputs["Y"] + 1, after)


def test_a_wrong_recording_is_noticed(tmp_path: Path) -> None:
    Q = normal(1, 2, 3, 8)
    path = tmp_path / "call.npz"
    with record(path):
        torch_onnx_attn.attention(Q, Q, Q)
    with np.load(path) as archive:
        arrays = dict(archive)
    arrays["output.Y"][0, 1, 2, 3] += 0.01
    np.savez(path, **arrays)
    replayed = replay(path, repeats=1)
    assert not replayed.agrees and not replayed.same_bits
    assert replayed.to_reference["Y"].agrees and replayed.to_recorded["Y"].where == (0, 1, 2, 3)


def test_an_op_that_is_wrong_here_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Q = normal(1, 2, 3, 8)
    with record(tmp_path / "call.npz"):
        torch_onnx_attn.attention(Q, Q, Q)
    right = torch_onnx_attn.ops.attention
    monkeypatch.setattr(
        torch_onnx_attn.ops, "attention", lambda *args, **kwargs: right(*args, **kwargs)._replace(Y=torch.zeros(1, 2, 3, 8))
    )
    replayed = replay(tmp_path / "call.npz", repeats=1)
    assert not replayed.to_reference["Y"].agrees and not replayed.to_recorded["Y"].agrees


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_the_cpu_on_cuda(tmp_path: Path, name: str) -> None:
    with record(tmp_path / "call.npz"):
        CALLS[name][0]()
    replayed = replay(tmp_path / "call.npz", device="cuda", repeats=3)
    assert replayed.agrees and replayed.device == "cuda"


# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04", b"\x93NUMPY"])
def test_a_file_that_is_no_recording(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "call.npz").write_bytes(content)
    with pytest.raises(BadInput, match="is not a recorded call"):
        load(tmp_path / "call.npz")
    with pytest.raises(BadInput, match="there is no such file"):
        load(tmp_path / "nothing.npz")


def test_every_truncation_of_a_recording(tmp_path: Path) -> None:
    path = tmp_path / "call.npz"
    with record(path):
        CALLS["mha"][0]()
    content = path.read_bytes()
    for length in range(0, len(content), 37):
        path.write_bytes(content[:length])
        with pytest.raises(BadInput):
            load(path)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"format": 99}, "has format 99"),
        ({"op": "paged_attention"}, "a call of 'paged_attention' that this version does not know"),
        ({"tensors": {}}, "does not know"),
        ({"tensors": {"input.Q": {"dtype": "float99", "strides": [1]}}}, "is not a whole recorded call"),
        ({"tensors": {"input.X": {"dtype": "float32", "strides": [1]}}}, "is not a whole recorded call"),
        ({"tensors": {"input.Q": {"dtype": "float32", "strides": [1]}}}, "is not a whole recorded call"),
        ({"attributes": {"speed": 3}}, "is not a whole recorded call: got an unexpected keyword argument 'speed'"),
        ({"attributes": None}, "is not a whole recorded call"),
        ({"origin": {}}, "is not a whole recorded call: 'name'"),
        ({"op": ["attention"]}, "is not a whole recorded call"),
        ({"op": "attention_cached"}, "does not know|missing a required argument"),
    ],
)
def test_recordings_that_hold_something_else(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    path = tmp_path / "call.npz"
    with record(path):
        CALLS["attention"][0]()
    with np.load(path) as archive:
        arrays = dict(archive)
    arrays["call"] = np.array(json.dumps(json.loads(str(arrays["call"])) | change))
    np.savez(path, **arrays)
    with pytest.raises(BadInput, match=reason):
        load(path)


def test_a_recording_without_outputs_agrees_with_nothing(tmp_path: Path) -> None:
    path = tmp_path / "call.npz"
    with record(path):
        CALLS["attention"][0]()
    with np.load(path) as archive:
        arrays = dict(archive)
    facts = json.loads(str(arrays["call"]))
    facts["tensors"] = {name: fact for name, fact in facts["tensors"].items() if name.startswith("input")}
    np.savez(path, **arrays | {"call": np.array(json.dumps(facts))})
    with pytest.raises(BadInput, match="does not know"):
        load(path)


def test_where_nothing_can_be_written_the_calls_are_not_made(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="its folder does not exist"), record(tmp_path / "missing" / "call.npz"):
        raise AssertionError


def test_a_plain_npz_is_no_recording(tmp_path: Path) -> None:
    np.savez(tmp_path / "call.npz", x=np.zeros(3))
    with pytest.raises(BadInput, match="is not a recorded call"):
        load(tmp_path / "call.npz")
