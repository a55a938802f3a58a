"""A warning for ops that run inside torch's own context_parallel(), which replaces scaled_dot_product_attention and nothing else.

Each rank would attend to its own rows only, and nothing would fail. Only a kernel of the op itself sees every call, in any gradient
mode, so there is one at the last key before the device's; it costs about 2.5 µs of host time a call, from the import of
``torch_onnx_attn.distributed`` on.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..autograd import OPERATORS


class ContextParallelWarning(UserWarning):
    """An onnx_attn op ran where torch's context_parallel() splits the sequence, and sees this rank's rows only."""


class _Expected(threading.local):
    depth = 0


_expected = _Expected()


@contextlib.contextmanager
def expected_call() -> Iterator[None]:
    """Around calls of ops whose caller takes care of what lies on other ranks."""
    _expected.depth += 1
    try:
        yield
    finally:
        _expected.depth -= 1


def is_inside_context_parallel() -> bool:
    """Whether torch's context_parallel() has replaced torch.nn.functional.scaled_dot_product_attention."""
    module = getattr(torch.nn.functional.scaled_dot_product_attention, "__module__", None)
    return module is not None and module.startswith("torch.distributed")


def _watched(op: Any) -> Callable[..., Any]:
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if is_inside_context_parallel() and not _expected.depth:
            warnings.warn(
                f"{op}: runs inside torch's context_parallel(), which does not split this op: it attends to this rank's rows only. "
                "Use torch_onnx_attn.distributed.context_parallel_attention",
                ContextParallelWarning,
                stacklevel=2,
            )
        return op.redispatch(keyset & below, *args, **kwargs)

    return kernel


_library = torch.library.Library("onnx_attn", "IMPL")


def install() -> None:
    """Watches every op that attends."""
    for name in OPERATORS:
        packet = getattr(torch.ops.onnx_attn, name)
        if "scatter" in name or name == "valid_kv_length":
            continue
        for overload in packet.overloads():
            suffix = "" if overload == "default" else f".{overload}"
            _library.impl(f"{name}{suffix}", _watched(getattr(packet, overload)), "BackendSelect", with_keyset=True)
