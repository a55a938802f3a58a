"""ONNX attention operators with their exact meaning, as PyTorch ops that run fast and export to single ONNX nodes.

Importing the package registers ``torch.ops.onnx_attn`` and changes nothing else in the process.
"""

import sys as _sys
from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from .version import __version__

if _TYPE_CHECKING:
    from .routing import RoutingReport, route_attention

_load_error: Exception | None = None
try:
    # Registration: the schemas come first.
    # isort: off
    from .library import build_info
    from . import fake as _fake  # noqa: F401
    from . import composite as _composite  # noqa: F401
    from . import autograd as _autograd  # noqa: F401
    from . import autocast as _autocast  # noqa: F401

    # isort: on
    from . import nn
    from .diagnostics import PerformanceWarning
    from .explain import CPU, H200, Machine, Plan, explain, kernel
    from .ops import (
        AttentionOutput,
        MultiHeadAttentionOutput,
        attention,
        attention_cached,
        mha,
        tensor_scatter,
        tensor_scatter_,
        valid_kv_length,
    )
except Exception as _error:
    # With `python -m torch_onnx_attn`, whose `info` must be able to say what is broken, Python imports this package first and
    # sys.argv[0] is "-m" meanwhile. Everybody else hears of it here.
    if _sys.argv[:1] != ["-m"]:
        raise
    _load_error = _error


def __getattr__(name: str) -> _Any:
    """The parts that need more than torch are imported when they are first used."""
    if _load_error is not None and name in __all__:
        raise ImportError(f"torch_onnx_attn could not be loaded: {_load_error}") from _load_error
    if name in ("models", "onnx", "record", "reference"):
        return _import_module(f"{__name__}.{name}")
    if name in ("RoutingReport", "route_attention"):  # the module imports torch's compiler, which takes seconds
        globals()[name] = getattr(_import_module(f"{__name__}.routing"), name)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "CPU",
    "H200",
    "AttentionOutput",
    "Machine",
    "MultiHeadAttentionOutput",
    "PerformanceWarning",
    "Plan",
    "RoutingReport",
    "__version__",
    "attention",
    "attention_cached",
    "build_info",
    "explain",
    "kernel",
    "mha",
    "nn",
    "route_attention",
    "tensor_scatter",
    "tensor_scatter_",
    "valid_kv_length",
]
