"""The packages that this folder needs beyond torch, or a sentence that says how to get them."""

from __future__ import annotations

from ..onnx.requirements import require_packages

__all__ = ["first_line", "numpy", "onnx"]

require_packages()

import numpy  # noqa: E402
import onnx  # noqa: E402
import onnx.inliner  # noqa: E402
import onnx.shape_inference  # noqa: E402


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
