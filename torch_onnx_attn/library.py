"""Loads the compiled library, which registers ``torch.ops.onnx_attn``, and says what it holds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def _library_path() -> Path:
    named = os.environ.get("TORCH_ONNX_ATTN_LIB")
    if named:
        return Path(named)
    found = sorted(Path(__file__).parent.glob("_C*.so"))
    if not found:
        raise ImportError(
            "torch_onnx_attn is not built: there is no _C*.so beside it. Run `make build` in the repository, or install it with "
            "`pip install --no-build-isolation .`"
        )
    return found[0]


LIBRARY_PATH = _library_path()
torch.ops.load_library(str(LIBRARY_PATH))

_CUDA_STATES = {0: "not built", 1: "built, but this torch has no CUDA", 2: "built"}


def build_info() -> dict[str, Any]:
    """What this installation holds.

    Returns:
        A dict with ``version`` (str), ``library`` (path of the shared object), ``torch`` (version in use), ``cpu`` (always True),
        ``cuda`` (True when CUDA tensors can be used), ``cuda_state`` (the same in words) and ``cuda_architectures`` (compute
        capabilities with compiled code, such as 80 and 90; newer GPUs use the PTX that is included).
    """
    from . import __version__

    state, *architectures = torch.ops.onnx_attn._build_info()
    return {
        "version": __version__,
        "library": str(LIBRARY_PATH),
        "torch": torch.__version__,
        "cpu": True,
        "cuda": state == 2 and torch.cuda.is_available(),
        "cuda_state": _CUDA_STATES[state],
        "cuda_architectures": list(architectures),
    }
