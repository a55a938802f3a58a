"""Autograd, of which there is a forward pass only, and autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Case, MhaCase, assert_same_bits, make_inputs, make_mha_inputs
from sample_calls import FUNCTIONAL, run, samples
from torch import Tensor

import torch_onnx_attn

ops = torch.ops.onnx_attn


DIFFERENTIABLE = [name for name in FUNCTIONAL if name.split()[0] != "valid_kv_length"]


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


@pytest.mark.parametrize("is_compiled", [False, True])
def test_an_output_that_is_not_used_stops_no_backward_pass(is_compiled: bool, device: str) -> None:
    """A compiled graph has a gradient for every output: zeros for this one."""
    x, weight = (torch.randn(1, 2, 4, 8, device=device, requires_grad=True) for _ in range(2))

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * weight, ops.attention(x, x, x)

    torch._dynamo.reset()
    call = torch.compile(step, fullgraph=True, backend="aot_eager") if is_compiled else step
    call(x)[0].sum().backward()
    assert x.grad is not None and weight.grad is not None
    assert torch.equal(x.grad, weight.detach()) and torch.equal(weight.grad, x.detach())
    for used in (lambda outputs: outputs[1], lambda outputs: outputs[0] + outputs[1], lambda outputs: outputs[1] * float("nan")):
        with pytest.raises(RuntimeError, match="forward only"):
            used(call(x)).sum().backward()


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
        Y = ops.attention(**inputs)
    assert_same_bits("Y", Y, ops.attention(**inputs))


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
