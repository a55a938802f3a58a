"""Autocast: floating inputs are cast as torch casts those of scaled_dot_product_attention, so that Q, K and V keep one dtype.

float64 tensors stay as they are. An op that writes a cache in place cannot cast the cache, so there Q, K and V take the cache's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .autograd import twin_of


def _cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    castable = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
    return value.to(dtype) if castable and value.device.type == device_type else value


# The cache that a tensor is stored in decides its type: Q meets the keys.
_STORED_IN = {
    "onnx_attn::attention_cached": {"Q": "key_cache", "K": "key_cache", "V": "value_cache"},
    "onnx_attn::mha": {name: "past_key" for name in ("query", "key", "value", "bias", "attention_bias")},
}


def _kernel(op: Any, device_type: str, key: torch.DispatchKey) -> Callable[..., Any]:
    names = [argument.name for argument in op._schema.arguments]
    written = [argument.name for argument in op._schema.arguments if argument.alias_info and argument.alias_info.is_write]
    caches = _STORED_IN[op._schema.name] if written else {}
    excluded = torch._C.DispatchKeySet(key)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs

        def cast(name: str, value: Any) -> Any:
            if name in written:
                return value
            cache = given[caches[name]] if name in caches else None  # None for the cache too, which the op refuses
            return _cast(value, device_type, torch.get_autocast_dtype(device_type) if cache is None else cache.dtype)

        with torch._C._ExcludeDispatchKeyGuard(excluded):
            cast_args = [cast(name, value) for name, value in zip(names, args, strict=False)]
            return op(*cast_args, **{name: cast(name, value) for name, value in kwargs.items()})

    return kernel


_library = torch.library.Library("onnx_attn", "IMPL")

for _name in ("attention", "mha", "attention_cached"):
    _packet = getattr(torch.ops.onnx_attn, _name)
    for _overload in _packet.overloads():
        _op = getattr(_packet, _overload)
        for _device, _key in (("cpu", torch._C.DispatchKey.AutocastCPU), ("cuda", torch._C.DispatchKey.AutocastCUDA)):
            for _target in (_op, twin_of(_op)):
                _library.impl(_target, _kernel(_op, _device, _key), str(_key).rsplit(".", 1)[-1])
