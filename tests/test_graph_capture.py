"""CUDA graphs: a captured call follows what its inputs hold at replay, lengths included, with the bits of an eager call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Case, MhaCase, assert_same_bits, call_attention, call_mha, make_inputs, make_mha_inputs
from torch import Tensor

pytestmark = pytest.mark.gpu

ops = torch.ops.onnx_attn
Tensors = dict[str, Tensor]


def check_replay(call: Callable[[Tensors], Any], inputs: Tensors, changes: list[Tensors], written: tuple[str, ...] = ()) -> None:
    """Capture `call` once; for each change copy new numbers into the same tensors, replay, and compare with an eager call.

    `written` names the inputs that the call writes: they are set anew before each run, and compared after it.
    """
    static = {name: x.clone() for name, x in inputs.items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # a warm-up, so that nothing is loaded or allocated for the first time in the capture
        call({name: x.clone() for name, x in inputs.items()})
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(static)
    for change in [{}, *changes]:
        current = inputs | change
        for name, x in current.items():
            static[name].copy_(x)
        graph.replay()
        eager_inputs = {name: x.clone() for name, x in current.items()}
        eager = call(eager_inputs)
        for name, result in as_dict(eager).items():
            assert_same_bits(f"{name} after {list(change)}", as_dict(captured)[name], result)
        for name in written:
            assert_same_bits(f"{name} after {list(change)}", static[name], eager_inputs[name])


def as_dict(outputs: Any) -> Tensors:
    return outputs if isinstance(outputs, dict) else {"output": outputs}


def on_device(*numbers: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("q_len", [1, 130])
@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths(dtype: torch.dtype, q_len: int, is_causal: bool) -> None:
    """Captured with short lengths, replayed with long ones and with none."""
    inputs = make_inputs(Case(dtype=dtype, q_heads=8, kv_heads=2, q_len=q_len, kv_len=4200, head_size=64), "cuda")
    inputs["nonpad_kv_seqlen"] = on_device(1, 3)
    changes = [{"nonpad_kv_seqlen": on_device(*lengths)} for lengths in ((4200, 4199), (0, 130), (2049, 64), (1, 3))]
    changes.append({"Q": inputs["Q"].flip(0), "V": inputs["V"] * 2})
    check_replay(lambda x: call_attention(x, is_causal=is_causal), inputs, changes)


@pytest.mark.parametrize("mask", ["bool", "same"])
@pytest.mark.parametrize("head_size", [64, 128, 300])
def test_masks(mask: str, head_size: int) -> None:
    inputs = make_inputs(Case(dtype=torch.float16, q_len=70, kv_len=200, head_size=head_size, mask=mask), "cuda")
    check_replay(lambda x: call_attention(x, softcap=10.0), inputs, [{"attn_mask": inputs["attn_mask"].flip(-1)}])


@pytest.mark.parametrize("mode", [None, 0, 3])
def test_past(mode: int | None) -> None:
    inputs = make_inputs(Case(dtype=torch.bfloat16, q_len=1, kv_len=1, past=700, head_size=64), "cuda")
    changes = [{"past_key": inputs["past_key"].flip(2)}, {"K": -inputs["K"], "past_value": inputs["past_value"] + 1}]
    check_replay(lambda x: call_attention(x, mode, is_causal=True), inputs, changes)


@pytest.mark.parametrize("new_len", [1, 5, 130])
@pytest.mark.parametrize("length_dtype", [torch.int64, torch.int32], ids=str)
def test_cached(new_len: int, length_dtype: torch.dtype) -> None:
    inputs = make_inputs(Case(dtype=torch.float16, q_heads=8, kv_heads=2, q_len=new_len, kv_len=new_len, head_size=64), "cuda")
    caches = {name: torch.randn(2, 2, 3000, 64, device="cuda", dtype=torch.float16) for name in ("key_cache", "value_cache")}
    inputs |= caches | {"cache_lengths": on_device(0, 1, dtype=length_dtype)}
    changes = [{"cache_lengths": on_device(*lengths, dtype=length_dtype)} for lengths in ((2800, 17), (100, 2100), (0, 0))]
    check_replay(lambda x: ops.attention_cached(**x, is_causal=True), inputs, changes, ("key_cache", "value_cache"))


def test_cached_steps_advance_inside_one_graph() -> None:
    """The graph of one step, replayed with lengths that the graph itself advances, is the whole generation."""
    prompt = make_inputs(Case(dtype=torch.float32, q_len=9, kv_len=9), "cuda")
    whole = ops.attention(**prompt, is_causal=True)
    caches = {name: torch.zeros(2, 2, 16, 16, device="cuda") for name in ("key_cache", "value_cache")}
    lengths = on_device(0, 0)
    step = {name: x[:, :, :1].clone() for name, x in prompt.items()}

    def run() -> Tensor:
        Y = ops.attention_cached(**step, **caches, cache_lengths=lengths, is_causal=True)
        lengths.add_(1)
        return Y

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        Y = run()
    lengths.zero_()
    for token in range(9):
        for name, x in prompt.items():
            step[name].copy_(x[:, :, token : token + 1])
        graph.replay()
        torch.testing.assert_close(Y, whole[:, :, token : token + 1], atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("mask", ["lengths", "keys", "rows"])
@pytest.mark.parametrize("qk", [False, True])
def test_mha_padding(dtype: torch.dtype, mask: str, qk: bool) -> None:
    case = MhaCase(dtype=dtype, batch=3, q_len=70, kv_len=70, head_size=64, mask=mask, bias=True)
    inputs = make_mha_inputs(case, "cuda")
    changes = [{"key_padding_mask": inputs["key_padding_mask"].flip(0)}, {"query": inputs["query"] * 0.5}]
    check_replay(lambda x: call_mha(x, qk, **case.attributes()), inputs, changes)


@pytest.mark.parametrize("beams", [None, 2])
def test_mha_shared(beams: int | None) -> None:
    """The filled length is device data: captured at 3, replayed at 0 and nearly full."""
    case = MhaCase(dtype=torch.float16, batch=4, q_len=1, kv_len=1, past=3, capacity=900, head_size=64, beams=beams)
    inputs = make_mha_inputs(case, "cuda")
    for name in ("past_key", "past_value"):
        inputs[name] = torch.randn_like(inputs[name])
    inputs["key_padding_mask"] = torch.ones(4, 900, dtype=torch.int32, device="cuda")
    changes = [{"past_sequence_length": on_device(past, dtype=torch.int32)} for past in (0, 700, 898)]
    check_replay(lambda x: ops.mha.shared(**x, num_heads=2), inputs, changes, ("past_key", "past_value"))


def test_scatter() -> None:
    inputs = {
        "cache": torch.randn(3, 2, 50, 8, device="cuda"),
        "update": torch.randn(3, 2, 4, 8, device="cuda"),
        "write_indices": on_device(0, 1, 2),
    }
    changes = [{"write_indices": on_device(*indices)} for indices in ((46, 47, 48), (30, 20, 10))]

    def call(x: Tensors) -> Tensors:
        present = ops.tensor_scatter(x["cache"], x["update"], x["write_indices"], circular=True)
        ops.tensor_scatter_(x["cache"], x["update"], x["write_indices"])
        return {"present": present}

    check_replay(call, inputs, changes, ("cache",))


def test_mask_to_lengths_to_attention() -> None:
    """valid_kv_length feeds nonpad_kv_seqlen without the host seeing a number."""
    inputs = make_inputs(Case(dtype=torch.bfloat16, q_len=2, kv_len=300, head_size=64), "cuda")
    inputs["mask"] = (torch.arange(300, device="cuda") < on_device(3, 200)[:, None])[:, None, None]

    def call(x: Tensors) -> Tensor:
        return ops.attention(x["Q"], x["K"], x["V"], nonpad_kv_seqlen=ops.valid_kv_length(x["mask"]), is_causal=True)

    other = (torch.arange(300, device="cuda") < on_device(299, 0)[:, None])[:, None, None]
    check_replay(call, inputs, [{"mask": other}, {"mask": ~other}])


def test_calls_follow_the_current_stream() -> None:
    """Work is queued behind what the stream holds: a delayed write to Q is seen."""
    inputs = make_inputs(Case(dtype=torch.float16, q_len=64, kv_len=64, head_size=64), "cuda")
    expected = call_attention(inputs | {"Q": inputs["Q"] * 3})["Y"]
    Q = inputs["Q"].clone()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        Q.mul_(3)
        Y = call_attention(inputs | {"Q": Q})["Y"]
    torch.cuda.synchronize()
    assert_same_bits("Y", Y, expected)


def test_no_call_waits_for_the_device() -> None:
    """With a long sleep queued first, every op returns while the device still sleeps; torch reports any host sync as an error."""
    inputs = make_inputs(Case(dtype=torch.float16, q_len=2, kv_len=300, head_size=64, mask="bool", past=0), "cuda")
    plain = {name: x for name, x in inputs.items() if not name.startswith("past")}
    lengths = on_device(5, 300)
    caches = {name: torch.zeros(2, 2, 400, 64, device="cuda", dtype=torch.float16) for name in ("key_cache", "value_cache")}
    shared = make_mha_inputs(MhaCase(dtype=torch.float16, batch=4, q_len=1, kv_len=1, past=3, capacity=90, beams=2), "cuda")
    step = {name: inputs[name][:, :, :2] for name in "QKV"}

    def everything() -> None:
        call_attention(plain | {"nonpad_kv_seqlen": lengths}, is_causal=True)
        call_attention(inputs, 3)
        ops.attention_cached(**step, **caches, cache_lengths=on_zero, is_causal=True)
        call_mha(shared, num_heads=2)
        ops.tensor_scatter_(caches["key_cache"], step["K"], on_zero)
        ops.valid_kv_length(inputs["attn_mask"])

    on_zero = on_device(0, 1)
    everything()
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    done.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not done.query(), "the host waited"
    torch.cuda.synchronize()
