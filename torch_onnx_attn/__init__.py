"""ONNX attention operators with their exact meaning, as PyTorch ops that run fast and export to single ONNX nodes.

Importing the package registers ``torch.ops.onnx_attn`` and changes nothing else in the process.
"""

from importlib import import_module as _import_module
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _version
from types import ModuleType as _ModuleType

try:
    __version__ = _version("torch-onnx-attn")
except PackageNotFoundError:  # used from a checkout that was built in place and not installed
    __version__ = "0.1.0+source"

# Registration: the schemas come first.
# isort: off
from .library import build_info
from . import fake as _fake  # noqa: F401
from . import composite as _composite  # noqa: F401
from . import autograd as _autograd  # noqa: F401
from . import autocast as _autocast  # noqa: F401

# isort: on
from . import nn
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


def __getattr__(name: str) -> _ModuleType:
    """The parts that need more than torch are imported when they are first used."""
    if name in ("onnx", "reference"):
        return _import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "CPU",
    "H200",
    "AttentionOutput",
    "Machine",
    "MultiHeadAttentionOutput",
    "Plan",
    "__version__",
    "attention",
    "attention_cached",
    "build_info",
    "explain",
    "kernel",
    "mha",
    "nn",
    "tensor_scatter",
    "tensor_scatter_",
    "valid_kv_length",
]
