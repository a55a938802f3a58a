"""Autocast: floating inputs are cast as torch casts those of scaled_dot_product_attention, so that Q, K and V keep one dtype.

float64 tensors stay as they are. An op that writes a cache in place cannot cast the cache, so there Q, K and V take the cache's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    castable = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
    return value.to(dtype) if castable and value.device.type == device_type else value


def _kernel(op: Any, device_type: str, key: torch.DispatchKey) -> Callable[..., Any]:
    arguments = [argument.name for argument in op._schema.arguments]
    written = {argument.name for argument in op._schema.arguments if argument.alias_info and argument.alias_info.is_write}
    excluded = torch._C.DispatchKeySet(key)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        named = dict(zip(arguments, args, strict=False)) | kwargs
        caches = [named[name] for name in written]
        dtype = caches[0].dtype if caches else torch.get_autocast_dtype(device_type)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            cast_args = [
                value if name in written else _cast(value, device_type, dtype) for name, value in zip(arguments, args, strict=False)
            ]
            cast_kwargs = {name: value if name in written else _cast(value, device_type, dtype) for name, value in kwargs.items()}
            return op(*cast_args, **cast_kwargs)

    return kernel


_library = torch.library.Library("onnx_attn", "IMPL")

for _name in ("attention", "mha", "attention_cached"):
    _packet = getattr(torch.ops.onnx_attn, _name)
    for _overload in _packet.overloads():
        _op = getattr(_packet, _overload)
        _suffix = "" if _overload == "default" else f".{_overload}"
        for _device, _key in (("cpu", torch._C.DispatchKey.AutocastCPU), ("cuda", torch._C.DispatchKey.AutocastCUDA)):
            _library.impl(f"{_name}{_suffix}", _kernel(_op, _device, _key), str(_key).rsplit(".", 1)[-1])
