"""What PyTorch expects of an op: schema, fake kernels, compile, export, AOTInductor, autograd, autocast, the Python functions, nn."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case, MhaCase, assert_close, assert_same_bits, make_inputs, make_mha_inputs
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_onnx_attn
from torch_onnx_attn import reference

ops = torch.ops.onnx_attn
Call = tuple[Any, dict[str, Any]]  # an overload and its arguments


def samples(device: str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, Call]:
    """At least one call of every overload, by name; every layout where there are several."""
    calls: dict[str, Call] = {}

    def add(name: str, op: Any, inputs: dict[str, Tensor], **attributes: Any) -> None:
        calls[name] = (op, inputs | attributes)

    features: dict[str, dict[str, Any]] = {
        "bhsd": {"mask": "bool"},
        "bshd": {"mask": "same", "mask_axes": "h1k"},
        "3d": {"v_head_size": 8},
        "loose": {"lengths": "full"},
        "last axis strided": {"layout": "bhsd"},
        "one head": {"layout": "bshd", "q_heads": 1, "kv_heads": 1},
        "one row": {"layout": "bshd", "q_len": 1},
    }
    for layout, extra in features.items():
        case = (
            Case(**{"dtype": dtype, "layout": layout} | extra)
            if layout in ("bhsd", "bshd", "3d", "loose")
            else Case(**{"dtype": dtype} | extra)
        )
        past = Case(**vars(case) | {"past": 4, "lengths": None})
        inputs, with_past = make_inputs(case, device), make_inputs(past, device)
        if layout == "last axis strided":
            for tensors in (inputs, with_past):
                tensors["Q"] = torch.stack([tensors["Q"], tensors["Q"]], -1)[..., 0].transpose(1, 2).contiguous().transpose(1, 2)
                tensors["Q"] = torch.stack([tensors["Q"], tensors["Q"]], -1)[..., 0]
        inputs = {name: x.nan_to_num() if x.is_floating_point() and name != "attn_mask" else x for name, x in inputs.items()}
        attributes = case.attributes()
        add(f"attention {layout}", ops.attention.default, inputs, **attributes, is_causal=True)
        add(f"attention.qk {layout}", ops.attention.qk, inputs, **attributes, qk_matmul_output_mode=1, softcap=2.0)
        add(f"attention.lse {layout}", ops.attention.lse, inputs, **attributes, return_lse=True)
        add(f"attention.kv {layout}", ops.attention.kv, with_past, **attributes)
        add(f"attention.kv_qk {layout}", ops.attention.kv_qk, with_past, **attributes, qk_matmul_output_mode=3)
        caches = {
            "key_cache": torch.zeros(2, case.kv_heads, 20, 16),
            "value_cache": torch.zeros(2, case.kv_heads, 20, case.v_head_size or 16),
        }
        caches = {name: x.to(device, dtype) for name, x in caches.items()}
        cached = {name: inputs[name] for name in "QKV"} | caches | {"cache_lengths": torch.tensor([3, 0], device=device)}
        add(f"attention_cached {layout}", ops.attention_cached.default, cached, **attributes, is_causal=True)

    mha_dtype = torch.float32 if dtype == torch.float64 else dtype
    for layout in ("bsnh", "bnsh", "packed_kv", "packed_qkv"):
        sizes = {"q_len": 5, "kv_len": 5, "dtype": mha_dtype, "layout": layout, "mask": "keys", "attention_bias": "h"}
        inputs = make_mha_inputs(MhaCase(**sizes), device)
        add(f"mha {layout}", ops.mha.default, inputs, num_heads=2)
        add(f"mha.qk {layout}", ops.mha.qk, inputs, num_heads=2, output_qk=True, unidirectional=True)
        if layout.startswith("packed"):
            continue
        with_past = make_mha_inputs(MhaCase(**sizes, past=4, bias=True), device)
        add(f"mha.kv {layout}", ops.mha.kv, with_past, num_heads=2)
        add(f"mha.kv_qk {layout}", ops.mha.kv_qk, with_past, num_heads=2, output_qk=True)
        shared = make_mha_inputs(MhaCase(**sizes, past=4, capacity=12), device)
        shared |= {name: shared[name].nan_to_num(0, 0, 0) for name in ("past_key", "past_value")}
        add(f"mha.shared {layout}", ops.mha.shared, shared, num_heads=2)
    wide = make_mha_inputs(MhaCase(dtype=mha_dtype, v_head_size=24), device)
    add("mha wide values", ops.mha.default, wide, num_heads=2)

    scatter = {"update": torch.randn(2, 3, 2, 4), "write_indices": torch.tensor([0, 3])}
    scatter = {name: x.to(device) for name, x in scatter.items()}
    cache = torch.randn(2, 3, 6, 4).to(device)
    add("tensor_scatter", ops.tensor_scatter.default, {"past_cache": cache} | scatter)
    add(
        "tensor_scatter of a view", ops.tensor_scatter.default, {"past_cache": cache.transpose(1, 2).contiguous().transpose(1, 2)} | scatter
    )
    add("tensor_scatter_", ops.tensor_scatter_.default, {"cache": cache.clone()} | scatter, circular=True)
    add("valid_kv_length", ops.valid_kv_length.default, {"attn_mask": torch.rand(3, 2, 4, 9).to(device) > 0.5})
    add("valid_kv_length of a rank-2 mask", ops.valid_kv_length.default, {"attn_mask": torch.rand(4, 9).to(device) > 0.5})
    return calls


NAMES = list(samples())
FUNCTIONAL = [name for name in NAMES if not samples()[name][0]._schema.is_mutable]


def run(call: Call) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Results, and the tensor arguments after the call; the call's own tensors are left alone."""
    op, arguments = call
    fresh = {name: clone_like(x) if isinstance(x, Tensor) else x for name, x in arguments.items()}
    result = op(**fresh)
    results = [result] if isinstance(result, Tensor) else list(result or ())
    return results, {name: x for name, x in fresh.items() if isinstance(x, Tensor)}


def clone_like(x: Tensor) -> Tensor:
    """The same values, sizes and strides in storage of its own."""
    storage = x.untyped_storage().clone()
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, x.storage_offset(), x.size(), x.stride())


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
    with FakeTensorMode() as mode:
        fake_arguments = {key: mode.from_tensor(x) if isinstance(x, Tensor) else x for key, x in arguments.items()}
        result = op(**fake_arguments)
    fake = [result] if isinstance(result, Tensor) else list(result or ())
    described = [[(tuple(x.shape), x.stride(), x.dtype, x.device) for x in outputs] for outputs in (fake, real)]
    assert described[0] == described[1]


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"q_len": 0}, {"kv_len": 0}], ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "3d"])
def test_fake_strides_of_empty_outputs(sizes: dict[str, int], layout: str) -> None:
    case = Case(layout=layout, past=0, **sizes)
    inputs = make_inputs(case)
    real = ops.attention.kv_qk(**inputs, **case.attributes(), qk_matmul_output_mode=0)
    with FakeTensorMode() as mode:
        fake_inputs = {name: mode.from_tensor(x) for name, x in inputs.items()}
        fake = ops.attention.kv_qk(**fake_inputs, **case.attributes(), qk_matmul_output_mode=0)
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


# ---------------------------------------------------------------------------------------------------------------------
# torch.export and AOTInductor


class Decoder(torch.nn.Module):
    """One step over a static cache, then attention with a mask and with a past: mutable and pure ops in one graph."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.register_buffer("key_cache", torch.zeros(2, 2, 20, 16, device=device))
        self.register_buffer("value_cache", torch.zeros(2, 2, 20, 16, device=device))

    def forward(self, Q: Tensor, K: Tensor, V: Tensor, mask: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        Y = ops.attention_cached(Q, K, V, self.key_cache, self.value_cache, lengths, is_causal=True)
        masked, scores = ops.attention.qk(Y, K, V, mask, qk_matmul_output_mode=3)
        hidden = masked.transpose(1, 2).flatten(2)
        return ops.mha(hidden, hidden, hidden, num_heads=4, unidirectional=True), scores


def decoder_inputs(device: str, rows: int = 3) -> tuple[Tensor, ...]:
    inputs = make_inputs(Case(q_len=rows, kv_len=rows, mask="bool", mask_axes="qk"), device)
    return inputs["Q"], inputs["K"], inputs["V"], inputs["attn_mask"], torch.tensor([4, 0], device=device)


def test_export(device: str) -> None:
    """Dynamic lengths; the buffers that the graph writes are updated at each call; the ops stay whole in the graph."""
    rows = torch.export.Dim("rows", min=2, max=10)
    dynamic = ({2: rows}, {2: rows}, {2: rows}, {0: rows, 1: rows}, None)
    program = torch.export.export(Decoder(device), decoder_inputs(device), dynamic_shapes=dynamic, strict=False)
    called = [str(node.target) for node in program.graph.nodes if "onnx_attn" in str(node.target)]
    assert {"onnx_attn.attention.qk", "onnx_attn.mha.default"} <= set(called)
    exported = program.module()
    eager = Decoder(device)
    for rows_now in (3, 7):
        arguments = decoder_inputs(device, rows_now)
        for actual, expected in zip(exported(*arguments), eager(*arguments), strict=True):
            torch.testing.assert_close(actual, expected, atol=5e-6, rtol=5e-6)
    buffers = dict(exported.named_buffers())
    assert_same_bits("key_cache", buffers["key_cache"], eager.key_cache)


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_export_every_functional_overload(name: str) -> None:
    op, arguments = samples()[name]
    tensors = {key: x for key, x in arguments.items() if isinstance(x, Tensor)}
    others = {key: x for key, x in arguments.items() if key not in tensors}

    class Module(torch.nn.Module):
        def forward(self, **tensors: Tensor) -> Any:
            return op(**tensors, **others)

    program = torch.export.export(Module(), (), tensors, strict=False)
    assert [node.target for node in program.graph.nodes if node.op == "call_function" and "onnx_attn" in str(node.target)] == [op]
    result = program.module()(**tensors)
    results = [result] if isinstance(result, Tensor) else list(result)
    for actual, expected in zip(results, run((op, arguments))[0], strict=True):
        assert_same_bits(name, actual, expected)


def test_decompositions_leave_the_in_place_ops_whole() -> None:
    """Their pure form copies the cache, so it is for the ONNX exporter alone (test_export_caches)."""
    program = torch.export.export(Decoder("cpu"), decoder_inputs("cpu"), strict=False).run_decompositions({})
    text = str(program.graph)
    assert "onnx_attn.attention_cached" in text and "onnx_attn.tensor_scatter" not in text
    eager = Decoder("cpu")
    arguments = decoder_inputs("cpu")
    for actual, expected in zip(program.module()(*arguments), eager(*arguments), strict=True):
        torch.testing.assert_close(actual, expected, atol=5e-6, rtol=5e-6)


@pytest.mark.slow
def test_aot_inductor(tmp_path: Path, device: str) -> None:
    program = torch.export.export(Decoder(device), decoder_inputs(device), strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "decoder.pt2"))
        loaded = torch._inductor.aoti_load_package(package)
    eager = Decoder(device)
    arguments = decoder_inputs(device)
    for _ in range(2):  # the second call finds what the first one left in the caches
        for actual, expected in zip(loaded(*arguments), eager(*arguments), strict=True):
            torch.testing.assert_close(actual, expected, atol=5e-6, rtol=5e-6)


# ---------------------------------------------------------------------------------------------------------------------
# Autograd and autocast

DIFFERENTIABLE = [name for name in FUNCTIONAL if name.split()[0] not in ("valid_kv_length",)]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_forward_only(name: str, device: str) -> None:
    """Inputs may require gradients; the forward pass is as ever; a backward pass says what it lacks."""
    op, arguments = samples(device)[name]
    expected, _ = run((op, arguments))
    leaves = {
        key: x.detach().clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for key, x in arguments.items()
    }
    result = op(**leaves)
    results = [result] if isinstance(result, Tensor) else list(result)
    for actual, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(actual.detach(), wanted, atol=1e-5, rtol=1e-5)
    assert results[0].requires_grad
    with pytest.raises(RuntimeError, match="forward only"):
        results[0].nan_to_num().sum().backward()


def test_forward_only_when_compiled(device: str) -> None:
    inputs = {name: x.requires_grad_() for name, x in make_inputs(Case(), device).items()}
    torch._dynamo.reset()
    compiled = torch.compile(lambda Q, K, V: ops.attention(Q, K, V, is_causal=True) * 2, fullgraph=True, backend="aot_eager")
    Y = compiled(**inputs)
    assert_same_bits("Y", Y.detach(), ops.attention(**inputs, is_causal=True).detach() * 2)
    with pytest.raises(RuntimeError, match="forward only"):
        Y.sum().backward()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context: Callable[[], Any], device: str) -> None:
    inputs = {name: x.requires_grad_() for name, x in make_inputs(Case(past=2), device).items()}
    with context():
        outputs = ops.attention.kv(**inputs)
    assert not any(x.requires_grad for x in outputs)


def test_gradients_pass_by(device: str) -> None:
    """A parameter beside the op is still trained; only a path through the op is refused."""
    inputs = make_inputs(Case(), device)
    weight = torch.ones((), device=device, requires_grad=True)
    (ops.attention(**inputs) * weight).sum().backward()
    assert weight.grad is not None and float(weight.grad) != 0


@pytest.mark.parametrize("autocast_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "dtypes", [(torch.float32,) * 3, (torch.float32, torch.bfloat16, torch.float32), (torch.float16, torch.float16, torch.float32)]
)
def test_autocast(autocast_dtype: torch.dtype, dtypes: tuple[torch.dtype, ...], device: str) -> None:
    """Q, K and V end in one type, whatever mixture a layer's projections leave."""
    inputs = make_inputs(Case(q_len=5, kv_len=9, mask="float32"), device)
    mixed = inputs | {name: inputs[name].to(dtype) for name, dtype in zip("QKV", dtypes, strict=True)}
    with torch.autocast(device, dtype=autocast_dtype):
        Y = ops.attention(**mixed)
        Y_function = torch_onnx_attn.attention(**mixed).Y
    cast = {name: x.to(autocast_dtype) for name, x in mixed.items()}
    assert_same_bits("Y", Y, ops.attention(**cast))
    assert_same_bits("Y", Y_function, Y)
    assert Y.dtype == autocast_dtype


def test_autocast_leaves_float64_integers_and_bools(device: str) -> None:
    inputs = make_inputs(Case(dtype=torch.float64, mask="bool", lengths="full"), device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert_same_bits("Y", ops.attention(**inputs), ops.attention(**inputs))
        assert ops.attention(**inputs).dtype == torch.float64


def test_autocast_of_the_other_ops(device: str) -> None:
    inputs = make_mha_inputs(MhaCase(bias=True, mask="keys", attention_bias="h", past=3), device)
    with torch.autocast(device, dtype=torch.bfloat16):
        outputs = ops.mha.kv(**inputs, num_heads=2)
    cast = {name: x.bfloat16() if x.is_floating_point() else x for name, x in inputs.items()}
    for actual, expected in zip(outputs, ops.mha.kv(**cast, num_heads=2), strict=True):
        assert_same_bits("output", actual, expected)
    # A cache that is written cannot be cast: what is written takes its type.
    step = make_inputs(Case(q_len=1, kv_len=1), device)
    caches = {name: torch.zeros(2, 2, 4, 16, dtype=torch.float16, device=device) for name in ("key_cache", "value_cache")}
    with torch.autocast(device, dtype=torch.bfloat16):
        Y = ops.attention_cached(**step, **caches, cache_lengths=torch.tensor([0, 2], device=device))
    assert Y.dtype == torch.float16
    assert_same_bits("key_cache", caches["key_cache"][0, :, :1], step["K"][0].half())


def test_autocast_is_off_where_it_is_off(device: str) -> None:
    inputs = make_inputs(Case(), device)
    with torch.autocast(device, dtype=torch.bfloat16), torch.autocast(device, enabled=False):
        assert ops.attention(**inputs).dtype == torch.float32


# ---------------------------------------------------------------------------------------------------------------------
# The Python functions


def test_attention_function(device: str) -> None:
    inputs = make_inputs(Case(past=3, mask="same"), device)
    plain = {name: inputs[name] for name in "QKV"}
    output = torch_onnx_attn.attention(**plain)
    assert isinstance(output, torch_onnx_attn.AttentionOutput)
    assert output[1:] == (None, None, None)
    assert_same_bits("Y", output.Y, ops.attention(**plain))
    output = torch_onnx_attn.attention(**inputs, is_causal=True)
    assert output.qk_matmul_output is None
    for actual, expected in zip(output[:3], ops.attention.kv(**inputs, is_causal=True), strict=True):
        assert_same_bits("output", actual, expected)
    output = torch_onnx_attn.attention(**plain, qk_matmul_output_mode=0)
    assert output.present_key is None and output.present_value is None
    assert_same_bits("qk_matmul_output", output.qk_matmul_output, ops.attention.qk(**plain, qk_matmul_output_mode=0)[1])
    for actual, expected in zip(
        torch_onnx_attn.attention(**inputs, qk_matmul_output_mode=3), ops.attention.kv_qk(**inputs, qk_matmul_output_mode=3), strict=True
    ):
        assert_same_bits("output", actual, expected)


def test_attention_function_replaces_the_one_of_torch(device: str) -> None:
    """Every argument of torch.onnx.ops.attention, by position and by name; where that one is right, the same numbers."""
    import inspect

    theirs = list(inspect.signature(torch.onnx.ops.attention).parameters.values())
    ours = inspect.signature(torch_onnx_attn.attention).parameters
    assert all(ours[parameter.name].kind == parameter.kind for parameter in theirs)
    positional = [parameter.name for parameter in theirs if parameter.kind == parameter.POSITIONAL_OR_KEYWORD]
    assert list(ours)[: len(positional)] == positional
    inputs = make_inputs(Case(q_len=5, kv_len=9, past=3), device)
    arguments = (inputs["Q"], inputs["K"], inputs["V"], None, inputs["past_key"], inputs["past_value"])
    options = {"kv_num_heads": 0, "q_num_heads": 0, "scale": 0.2, "softcap": 0.0, "softmax_precision": None, "is_causal": False}
    expected = torch.onnx.ops.attention(*arguments, **options, qk_matmul_output_mode=0)
    actual = torch_onnx_attn.attention(*arguments, **options, qk_matmul_output_mode=0)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_mha_function(device: str) -> None:
    inputs = make_mha_inputs(MhaCase(past=3, bias=True, mask="keys"), device)
    plain = {name: inputs[name] for name in ("query", "key", "value")}
    output = torch_onnx_attn.mha(**plain, num_heads=2)
    assert isinstance(output, torch_onnx_attn.MultiHeadAttentionOutput) and output[1:] == (None, None, None)
    assert_same_bits("output", output.output, ops.mha(**plain, num_heads=2))
    output = torch_onnx_attn.mha(**plain, num_heads=2, output_qk=True)
    assert output.present_key is None and output.qk is not None
    for actual, expected in zip(
        torch_onnx_attn.mha(**inputs, num_heads=2, output_qk=True), ops.mha.kv_qk(**inputs, num_heads=2, output_qk=True), strict=True
    ):
        assert_same_bits("output", actual, expected)
    assert torch_onnx_attn.mha(**inputs, num_heads=2).qk is None
    shared = make_mha_inputs(MhaCase(past=3, capacity=20), device)
    output = torch_onnx_attn.mha(**shared, num_heads=2)
    assert output[1:] == (None, None, None)
    filled = shared["past_key"][:, :, 3:12]
    assert_same_bits("past_key", filled, shared["key"].unflatten(2, (2, 16)).transpose(1, 2).contiguous())
    # Without a past the length and the indirection mean nothing, as in ONNX Runtime.
    unused = {"past_sequence_length": torch.tensor([1]), "cache_indirection": torch.zeros(1, 2, 9, dtype=torch.int32)}
    assert_same_bits("output", torch_onnx_attn.mha(**plain, **unused, num_heads=2).output, ops.mha(**plain, num_heads=2))


def test_cache_functions(device: str) -> None:
    cache, update, index = (
        torch.randn(2, 3, 6, 4, device=device),
        torch.randn(2, 3, 2, 4, device=device),
        torch.tensor([5, 1], device=device),
    )
    present = torch_onnx_attn.tensor_scatter(cache, update, index, circular=True)
    assert_same_bits("present", present, reference.tensor_scatter(cache, update, index, circular=True))
    assert torch_onnx_attn.tensor_scatter_(cache, update, index, circular=True) is None
    assert_same_bits("cache", cache, present)
    mask = torch.rand(3, 2, 4, 9, device=device) > 0.5
    assert torch.equal(torch_onnx_attn.valid_kv_length(mask), reference.valid_kv_length(mask))
    step = make_inputs(Case(q_len=1, kv_len=1), device)
    caches = [{name: torch.zeros(2, 2, 4, 16, device=device) for name in ("key_cache", "value_cache")} for _ in range(2)]
    lengths = torch.tensor([0, 2], device=device)
    Y = torch_onnx_attn.attention_cached(**step, **caches[0], cache_lengths=lengths, softcap=3.0)
    assert_same_bits("Y", Y, ops.attention_cached(**step, **caches[1], cache_lengths=lengths, softcap=3.0))


def test_threads_may_call_at_once() -> None:
    """No state is shared between calls."""
    calls = [
        make_inputs(Case(q_len=rows, kv_len=200, head_size=64, dtype=dtype))
        for rows in (3, 40)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    expected = [ops.attention(**call, is_causal=True) for call in calls]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            for actual, wanted in zip(pool.map(lambda call: ops.attention(**call, is_causal=True), calls), expected, strict=True):
                assert_same_bits("Y", actual, wanted)


# ---------------------------------------------------------------------------------------------------------------------
# nn


def test_attention_module(device: str) -> None:
    module = torch_onnx_attn.nn.Attention(64, 4, 2, is_causal=True, softcap=5.0, left_window_size=3, device=device)
    hidden = torch.randn(2, 7, 64, device=device)
    mask = torch.rand(7, 7, device=device) > 0.2
    Q, K, V = (projection(hidden).unflatten(2, (-1, 16)).transpose(1, 2) for projection in (module.q_proj, module.k_proj, module.v_proj))
    assert Q.shape[1] == 4 and K.shape[1] == 2
    exact = reference.attention(Q.detach(), K.detach(), V.detach(), mask, is_causal=True, softcap=5.0, left_window_size=3).Y
    expected = module.out_proj(exact.float().transpose(1, 2).flatten(2))
    with torch.no_grad():
        torch.testing.assert_close(module(hidden, mask), expected, atol=1e-5, rtol=1e-5)
        lengths = torch.tensor([7, 4], device=device)
        changed = hidden.clone()
        changed[1, 4:] = 100.0
        torch.testing.assert_close(module(changed, nonpad_kv_seqlen=lengths)[1, :4], module(hidden, nonpad_kv_seqlen=lengths)[1, :4])


def test_attention_module_with_caches(device: str) -> None:
    """Token by token over static caches, the module gives what it gives for the whole sequence."""
    module = torch_onnx_attn.nn.Attention(64, 4, 2, head_size=24, bias=False, is_causal=True, device=device).eval()
    hidden = torch.randn(2, 6, 64, device=device)
    caches = {name: torch.zeros(2, 2, 8, 24, device=device) for name in ("key_cache", "value_cache")}
    lengths = torch.zeros(2, dtype=torch.int64, device=device)
    with torch.no_grad():
        whole = module(hidden)
        for token in range(6):
            step = module(hidden[:, token : token + 1], **caches, cache_lengths=lengths)
            torch.testing.assert_close(step, whole[:, token : token + 1], atol=1e-5, rtol=1e-5)
            lengths += 1
        with pytest.raises(ValueError, match="together"):
            module(hidden, key_cache=caches["key_cache"])
        with pytest.raises(ValueError, match="nonpad_kv_seqlen"):
            module(hidden, nonpad_kv_seqlen=lengths, **caches, cache_lengths=lengths)


def test_mha_module(device: str) -> None:
    module = torch_onnx_attn.nn.MultiHeadAttention(32, 4, device=device)
    assert module.in_proj_bias is not None
    torch.nn.init.normal_(module.in_proj_bias)
    query, key = torch.randn(2, 5, 32, device=device), torch.randn(2, 9, 32, device=device)
    mask = torch.rand(2, 9, device=device) > 0.3
    projected = [module.q_proj(query), module.k_proj(key), module.v_proj(key)]
    exact = reference.mha(*(x.detach() for x in projected), module.in_proj_bias.detach(), mask, num_heads=4).output
    with torch.no_grad():
        assert_close("output", module(query, key, key_padding_mask=mask), module.out_proj(exact.float()).double(), 1e-4)
        torch.testing.assert_close(module(query), module(query, query, query))
    assert torch_onnx_attn.nn.MultiHeadAttention(32, 4, bias=False).in_proj_bias is None


def test_mha_module_is_the_one_of_torch(device: str) -> None:
    """The same weights in torch.nn.MultiheadAttention give the same numbers; its padding mask says True for *drop*."""
    theirs = torch.nn.MultiheadAttention(32, 4, batch_first=True, device=device)
    ours = torch_onnx_attn.nn.MultiHeadAttention(32, 4, device=device)
    with torch.no_grad():
        theirs.in_proj_bias.normal_()
        for projection, weight in zip((ours.q_proj, ours.k_proj, ours.v_proj), theirs.in_proj_weight.chunk(3), strict=True):
            projection.weight.copy_(weight)
        ours.in_proj_bias.copy_(theirs.in_proj_bias)
        ours.out_proj.load_state_dict(theirs.out_proj.state_dict())
        query = torch.randn(2, 6, 32, device=device)
        drop = torch.tensor([[False] * 6, [False] * 4 + [True] * 2], device=device)
        expected = theirs(query, query, query, key_padding_mask=drop, need_weights=False)[0]
        torch.testing.assert_close(ours(query, key_padding_mask=~drop), expected, atol=1e-5, rtol=1e-5)


def test_modules_refuse_sizes_that_do_not_fit() -> None:
    nn = torch_onnx_attn.nn
    with pytest.raises(ValueError, match=r"num_kv_heads: is 3.*4"):
        nn.Attention(64, 4, 3)
    with pytest.raises(ValueError, match=r"embed_dim: is 65.*4"):
        nn.Attention(65, 4)
    with pytest.raises(ValueError, match=r"embed_dim: is 33.*4"):
        nn.MultiHeadAttention(33, 4)
    hidden = torch.randn(2, 5, 64)
    for wrong in (hidden[..., :63], hidden[0], [[1.0]], None):
        with pytest.raises(ValueError, match=r"^hidden: is .*must be a tensor \[batch, rows, embed_dim = 64\]"):
            nn.Attention(64, 4)(wrong)
        with pytest.raises(ValueError, match=r"^query: is .*must be a tensor \[batch, rows, embed_dim = 64\]"):
            nn.MultiHeadAttention(64, 4)(wrong)
    for key, value, name in ((hidden[..., :63], None, "key"), (hidden, "value", "value")):
        with pytest.raises(ValueError, match=rf"^{name}: is .*must be a tensor"):
            nn.MultiHeadAttention(64, 4)(hidden, key, value)


@pytest.mark.parametrize("autocast", [False, True])
def test_modules_compile(autocast: bool, device: str) -> None:
    attention = torch_onnx_attn.nn.Attention(64, 4, 2, is_causal=True, device=device).eval()
    mha = torch_onnx_attn.nn.MultiHeadAttention(64, 4, device=device).eval()
    hidden = torch.randn(2, 7, 64, device=device)

    def function(hidden: Tensor) -> Tensor:
        return mha(attention(hidden))

    torch._dynamo.reset()
    with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(hidden)
        torch.testing.assert_close(compiled, function(hidden))
        assert compiled.dtype == (torch.bfloat16 if autocast else torch.float32)
