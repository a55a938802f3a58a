"""Autograd: the forward pass accepts inputs that require gradients, and a backward pass says that there is none.

The error is an op of its own, so that a compiled training graph (which traces its backward ahead of time) still runs forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_MESSAGE = (
    "onnx_attn is forward only: torch.ops.onnx_attn ops have no backward. Run them under torch.no_grad() or "
    "torch.inference_mode(), or train with torch.nn.functional.scaled_dot_product_attention"
)

_definitions = torch.library.Library("onnx_attn", "FRAGMENT")
_definitions.define("_refuse_backward(Tensor[] gradients, Tensor[] inputs) -> Tensor[]")


def _refuse_backward(gradients: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    raise RuntimeError(_MESSAGE)


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


def _forward_only(op: Any) -> Callable[..., Any]:
    below_autograd = torch._C._after_autograd_keyset
    redispatch = op._handle.redispatch_boxed
    is_grad_enabled = torch.is_grad_enabled

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_grad_enabled():  # the way of every eager inference call: as little Python as there can be
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
            if not cache.is_inference():
                torch.autograd.graph.increment_version(cache)
        return result

    return kernel


_library = torch.library.Library("onnx_attn", "IMPL")
OPERATORS = ("attention", "mha", "tensor_scatter", "tensor_scatter_", "attention_cached", "valid_kv_length")

for _name in OPERATORS:
    _packet = getattr(torch.ops.onnx_attn, _name)
    for _overload in _packet.overloads():
        _op = getattr(_packet, _overload)
        _kernel = _forward_only_written(_op) if _op._schema.is_mutable else _forward_only(_op)
        _library.impl(_name if _overload == "default" else f"{_name}.{_overload}", _kernel, "Autograd", with_keyset=True)
