"""The packages that this folder needs beyond torch, or a sentence that says how to get them."""

from __future__ import annotations

from ..bad_input import first_line
from ..onnx.requirements import require_packages

__all__ = ["first_line", "ir", "numpy", "onnx"]

require_packages()

import numpy  # noqa: E402
import onnx  # noqa: E402
import onnx.inliner  # noqa: E402
import onnx.shape_inference  # noqa: E402
import onnx_ir as ir  # noqa: E402
