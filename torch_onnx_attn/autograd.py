"""Autograd: the forward pass accepts inputs that require gradients, and a backward pass says that there is none.

The error is an op of its own, so that a compiled training graph (which traces its backward ahead of time) still runs forward.

A Python kernel on the Autograd keys would nearly double the host time of a call. So calls on plain CPU and CUDA tensors skip these
keys, and the compiled kernels ask autograd for what they need while gradients are recorded (csrc/forward_only.h). Other calls are
those that torch dispatches to Python, for a mode or a tensor subclass, and those inside a torch.func transform. Both are known by a
key above autograd. There they turn into calls of a twin of the op, ``_traced_*``, which has the Python kernel, and hands back to
the op itself what comes below autograd: a mode, a tracer or a transform sees the op, never its twin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .explain import is_recording

_MESSAGE = (
    "onnx_attn is forward only: torch.ops.onnx_attn ops have no backward. Run them under torch.no_grad() or "
    "torch.inference_mode(), or train with torch.nn.functional.scaled_dot_product_attention"
)

_definitions = torch.library.Library("onnx_attn", "FRAGMENT")
# It reads the gradients, which a CUDA graph cannot.
_definitions.define("_refuse_backward(Tensor[] gradients, Tensor[] inputs) -> Tensor[]", tags=torch.Tag.cudagraph_unsafe)


def _refuse_backward(gradients: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """A compiled graph hands zeros to an output that nobody used. They stay zeros, whatever the derivative would be."""
    if any(bool(gradient.any()) for gradient in gradients):
        raise RuntimeError(_MESSAGE)
    return [torch.zeros_like(tensor) for tensor in inputs]


_definitions.impl("_refuse_backward", _refuse_backward, "CompositeExplicitAutograd")


def _refuse_backward_fake(gradients: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in inputs]


torch.library.register_fake("onnx_attn::_refuse_backward", _refuse_backward_fake, lib=_definitions)


class _ForwardOnly(torch.autograd.Function):
    """Runs ``call`` and hangs a node on its outputs whose backward raises. ``inputs`` are the tensors that require gradients."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], Any], *inputs: Tensor) -> Any:
        ctx.save_for_backward(*inputs)
        return call()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # The gradients are arguments so that a partitioner cannot move the refusal into the forward graph.
        return None, *torch.ops.onnx_attn._refuse_backward([g for g in gradients if g is not None], list(ctx.saved_tensors))


# ------------------------------------------------------------------------------------------------ what the compiled kernels ask


class _Refusal(torch.autograd.Function):
    """A node that saves nothing: no input outlives its call, and no hook on saved tensors runs below the compiled kernel, where an
    exception that steers its caller (torch.utils.checkpoint ends a recomputation by one) would lose its type."""

    @staticmethod
    def forward(ctx: Any, outputs: tuple[Tensor, ...], *inputs: Tensor) -> tuple[Tensor, ...]:
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(_MESSAGE)


def _hang_refusal(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    requiring = [tensor for tensor in inputs if tensor.requires_grad]
    if requiring:
        _Refusal.apply(tuple(outputs), *requiring)  # type: ignore[no-untyped-call]


def _requires_gradient(written: Tensor) -> bool:
    return written.requires_grad


_library = torch.library.Library("onnx_attn", "IMPL")
_library.impl("_hang_refusal", _hang_refusal, "Autograd")
_library.impl("_requires_gradient", _requires_gradient, "Autograd")


# ------------------------------------------------------------------------------------------------ the Python kernels


def _forward_only(op: Any) -> Callable[..., Any]:
    below_autograd = torch._C._after_autograd_keyset
    redispatch = op._handle.redispatch_boxed

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return redispatch(keyset & below_autograd, *args, **kwargs)

        def call() -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return redispatch(keyset & below_autograd, *args, **kwargs)

        inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.requires_grad]
        return _ForwardOnly.apply(call, *inputs) if inputs else call()  # type: ignore[no-untyped-call]

    return kernel


def _forward_only_written(op: Any) -> Callable[..., Any]:
    """As ``_forward_only``, for an op that writes some of its arguments."""
    kernel_below = _forward_only(op)
    names = [argument.name for argument in op._schema.arguments]
    written = [argument.name for argument in op._schema.arguments if argument.alias_info and argument.alias_info.is_write]

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        caches = {name: given[name] for name in written if isinstance(given[name], Tensor)}
        if torch.is_grad_enabled():
            for name, cache in caches.items():
                if cache.requires_grad:
                    raise RuntimeError(f"{name}: requires a gradient, but is written in place and onnx_attn is forward only; detach it")
        result = kernel_below(keyset, *args, **kwargs)
        for cache in caches.values():  # so that a backward pass that saved the cache notices the write
            if not (is_recording() or cache.is_inference()):
                torch.autograd.graph.increment_version(cache)
        return result

    return kernel


# ------------------------------------------------------------------------------------------------ who gets which


OPERATORS = ("attention", "mha", "tensor_scatter", "tensor_scatter_", "attention_cached", "valid_kv_length")

_ABOVE_AUTOGRAD = ("PythonTLSSnapshot", "FuncTorchDynamicLayerFrontMode")
_FROM_THE_TWIN = ("Python", "Functionalize", "FuncTorchBatched")  # where a call arrives that has no Autograd keys


def twin_of(op: Any) -> Any:
    """The op that stands in for ``op`` above autograd where Python is asked."""
    return getattr(getattr(torch.ops.onnx_attn, f"_traced_{op._schema.name.removeprefix('onnx_attn::')}"), op._overloadname)


def _pass_to(op: Any) -> Callable[..., Any]:
    redispatch = op._handle.redispatch_boxed
    # Under torch's Python dispatcher the keyset is that of a call that begins, and would lead to the twin again.
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.PythonTLSSnapshot)
    return lambda keyset, *args, **kwargs: redispatch(keyset & below, *args, **kwargs)


def _pass_to_twin(twin: Any) -> Callable[..., Any]:
    redispatch = twin._handle.redispatch_boxed
    key = torch._C.DispatchKey.AutogradCPU
    autograd, is_excluded = torch._C.DispatchKeySet(key), torch._C._dispatch_tls_is_dispatch_key_excluded

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_excluded(key):
            keyset = keyset | autograd  # the op skips this key, so that its keysets lack it
        return redispatch(keyset, *args, **kwargs)

    return kernel


def _register(op: Any) -> None:
    kernel = _forward_only_written(op) if op._schema.is_mutable else _forward_only(op)
    _definitions.define(str(op._schema).replace("onnx_attn::", "_traced_", 1))
    twin = twin_of(op)
    _library.impl(twin, kernel, "Autograd", with_keyset=True)
    _library.impl(twin, op, "CompositeExplicitAutograd")
    for key in _FROM_THE_TWIN:
        _library.impl(twin, _pass_to(op), key, with_keyset=True)

    _library.impl(op, kernel, "Autograd", with_keyset=True)  # of meta tensors, and of devices to come
    for key in ("AutogradCPU", "AutogradCUDA"):
        _library.impl(op, torch.library.fallthrough_kernel, key)
    for key in _ABOVE_AUTOGRAD:
        _library.impl(op, _pass_to_twin(twin), key, with_keyset=True)


for _name in OPERATORS:
    _packet = getattr(torch.ops.onnx_attn, _name)
    for _overload in _packet.overloads():
        _register(getattr(_packet, _overload))
