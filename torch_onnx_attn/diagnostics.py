"""How the package speaks up: one warning category and one logger.

``python -W error::torch_onnx_attn.PerformanceWarning`` turns slow paths into errors; ``TORCH_LOGS="+torch_onnx_attn"`` or
``logging.getLogger("torch_onnx_attn").setLevel(logging.DEBUG)`` shows what is decided. The package adds no handler of its own.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("torch_onnx_attn")


class PerformanceWarning(UserWarning):
    """Something runs, correctly, by a slower way than this package has for it."""
