"""What PyTorch expects of an op: schema, fake kernels, packets, compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import Case, MhaCase, assert_same_bits, make_inputs, make_mha_inputs
from sample_calls import NAMES, Call, clone_like, run, samples
from torch import Tensor
from ways import trace

import torch_onnx_attn

ops = torch.ops.onnx_attn


def test_every_overload_has_a_sample() -> None:
    packets = {
        name: getattr(ops, name)
        for name in ("attention", "mha", "tensor_scatter", "tensor_scatter_", "attention_cached", "valid_kv_length")
    }
    overloads = {getattr(packet, overload) for packet in packets.values() for overload in packet.overloads()}
    public = {overload for overload in overloads if overload._overloadname != "shared_functional"}
    assert public == {op for op, _ in samples().values()}


# ---------------------------------------------------------------------------------------------------------------------
# Schema and fake kernels


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str, device: str) -> None:
    op, arguments = samples(device)[name]
    torch.library.opcheck(op, (), arguments)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_fake_outputs_are_the_real_ones(name: str, dtype: torch.dtype, device: str) -> None:
    """Sizes, strides, types and devices."""
    op, arguments = samples(device, dtype)[name]
    real, _ = run((op, arguments))
    result = trace(op, arguments)
    fake = [result] if isinstance(result, Tensor) else list(result or ())
    described = [[(tuple(x.shape), x.stride(), x.dtype, x.device) for x in outputs] for outputs in (fake, real)]
    assert described[0] == described[1]


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"q_len": 0}, {"kv_len": 0}], ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "3d"])
def test_fake_strides_of_empty_outputs(sizes: dict[str, int], layout: str) -> None:
    case = Case(layout=layout, past=0, **sizes)
    inputs = make_inputs(case)
    arguments = inputs | case.attributes() | {"qk_matmul_output_mode": 0}
    real, fake = ops.attention.kv_qk(**arguments), trace(ops.attention.kv_qk, arguments)
    assert [(x.shape, x.stride()) for x in fake] == [(x.shape, x.stride()) for x in real]


def test_meta_tensors() -> None:
    inputs = {name: x.to("meta") for name, x in make_inputs(Case(q_len=5, head_size=16, v_head_size=24)).items()}
    Y = ops.attention(**inputs)
    assert Y.device.type == "meta" and tuple(Y.shape) == (2, 4, 5, 24)


# ---------------------------------------------------------------------------------------------------------------------
# Packets


def test_packets_choose_the_overload() -> None:
    """Calling torch.ops.onnx_attn.attention or .mha takes the overload whose arguments are given."""
    inputs = make_inputs(Case(past=2))
    plain = {name: inputs[name] for name in "QKV"}
    assert isinstance(ops.attention(**plain), Tensor)
    assert isinstance(ops.attention(plain["Q"], plain["K"], plain["V"], None, is_causal=True), Tensor)
    assert [tuple(x.shape) for x in ops.attention(**inputs)] == [(2, 4, 5, 16), (2, 2, 11, 16), (2, 2, 11, 16)]
    assert [tuple(x.shape) for x in ops.attention(**plain, qk_matmul_output_mode=0)] == [(2, 4, 5, 16), (2, 4, 5, 9)]
    assert [tuple(x.shape) for x in ops.attention(**inputs, qk_matmul_output_mode=0)][3] == (2, 4, 5, 11)
    assert [tuple(x.shape) for x in ops.attention(**plain, return_lse=True)] == [(2, 4, 5, 16), (2, 4, 5)]
    inputs = make_mha_inputs(MhaCase(past=2))
    plain = {name: inputs[name] for name in ("query", "key", "value")}
    assert isinstance(ops.mha(**plain, num_heads=2), Tensor)
    assert len(ops.mha(**inputs, num_heads=2)) == 3
    assert len(ops.mha(**plain, num_heads=2, output_qk=True)) == 2
    assert len(ops.mha(**inputs, num_heads=2, output_qk=True)) == 4
    shared = make_mha_inputs(MhaCase(past=2, capacity=20))
    assert isinstance(ops.mha(**shared, num_heads=2), Tensor)
    with pytest.raises(RuntimeError, match=r"^past_value: "):  # our own message, not the dispatcher's
        ops.attention(**{name: x for name, x in make_inputs(Case(past=2)).items() if name != "past_value"})
    with pytest.raises(RuntimeError, match=r"^nonpad_kv_seqlen: "):
        ops.attention(**make_inputs(Case(past=2)), nonpad_kv_seqlen=torch.tensor([1, 1]))


# ---------------------------------------------------------------------------------------------------------------------
# torch.compile


def check_compiled(call: Call, **options: Any) -> None:
    """The compiled call gives the bits of the eager one, results and written arguments."""
    op, arguments = call
    tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
    others = {name: x for name, x in arguments.items() if name not in tensors}

    def function(tensors: dict[str, Tensor]) -> Any:
        return op(**tensors, **others)

    expected, after = run(call)
    fresh = {name: clone_like(x) for name, x in tensors.items()}
    torch._dynamo.reset()
    result = torch.compile(function, fullgraph=True, **options)(fresh)
    results = [result] if isinstance(result, Tensor) else list(result or ())
    assert len(results) == len(expected)
    for index, (actual, wanted) in enumerate(zip(results, expected, strict=True)):
        assert_same_bits(f"output {index}", actual, wanted)
        assert actual.stride() == wanted.stride()
    for name, x in fresh.items():
        assert_same_bits(name, x, after[name])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(name: str, dynamic: bool, device: str) -> None:
    check_compiled(samples(device)[name], backend="aot_eager", dynamic=dynamic)


@pytest.mark.parametrize("name", ["attention bshd", "attention.kv 3d", "attention_cached bhsd", "mha.shared bsnh"])
def test_inductor(name: str, device: str) -> None:
    check_compiled(samples(device)[name], backend="inductor")


def test_compile_packets_and_python_functions(device: str) -> None:
    """fullgraph through the packets and through torch_onnx_attn's functions, several calls in one graph."""
    inputs = make_inputs(Case(past=3), device)

    def function(Q: Tensor, K: Tensor, V: Tensor, past_key: Tensor, past_value: Tensor) -> tuple[Tensor, ...]:
        first = torch_onnx_attn.attention(Q, K, V, None, past_key, past_value, is_causal=True, qk_matmul_output_mode=0)
        second = ops.attention(first.Y, first.present_key, first.present_value)
        third = torch_onnx_attn.mha(
            second.transpose(1, 2).flatten(2),
            first.present_key.repeat_interleave(2, 1),
            first.present_value.repeat_interleave(2, 1),
            num_heads=4,
        )
        assert third.present_key is None
        return first.Y, first.qk_matmul_output, third.output

    torch._dynamo.reset()
    for actual, expected in zip(torch.compile(function, fullgraph=True, backend="aot_eager")(**inputs), function(**inputs), strict=True):
        assert_same_bits("output", actual, expected)


def test_growing_lengths_do_not_recompile(device: str) -> None:
    """One graph serves every length: no Python-side guard looks at them."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(lambda Q, K, V, mask: ops.attention(Q, K, V, mask, is_causal=True), fullgraph=True, backend=counter)
    for kv_len in range(2, 34):
        inputs = make_inputs(Case(q_len=3, kv_len=kv_len, mask="bool"), device)
        actual = compiled(inputs["Q"], inputs["K"], inputs["V"], inputs["attn_mask"])
        assert_same_bits("Y", actual, ops.attention(**inputs, is_causal=True))
    assert counter.frame_count <= 2


def test_in_place_ops_stay_in_place_when_compiled(device: str) -> None:
    """No copy of the cache: the compiled function writes the storage that it was given."""
    cache = torch.zeros(2, 2, 8, 16, device=device)
    update = torch.randn(2, 2, 1, 16, device=device)
    pointer = cache.data_ptr()

    def function(cache: Tensor, update: Tensor, index: Tensor) -> Tensor:
        ops.tensor_scatter_(cache, update, index)
        return cache.sum()

    torch._dynamo.reset()
    total = torch.compile(function, fullgraph=True, backend="aot_eager")(cache, update, torch.tensor([3, 5], device=device))
    assert cache.data_ptr() == pointer
    assert_same_bits("cache", cache[0, :, 3:4], update[0])
    assert_same_bits("cache", cache[1, :, 5:6], update[1])
    torch.testing.assert_close(total, update.sum())
