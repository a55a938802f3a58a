"""What can be wrong with a rank's own tensors, found before anything is sent: the other ranks then wait for it and time out.

The op would find the same, but after its rank has taken part, when the others have what they need and return a result.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor


def check_heads(Q: Tensor, K: Tensor, V: Tensor) -> None:
    """Plain 4-D tensors on one device, that belong together but for their rows."""
    for name, tensor in (("Q", Q), ("K", K), ("V", V)):
        if isinstance(tensor, DTensor):
            raise RuntimeError(f"{name}: is a DTensor; give this rank's part as a plain tensor, as from to_local()")
        if tensor.dim() != 4:
            raise RuntimeError(f"{name}: has shape {list(tensor.shape)}; it must have 4 axes, [batch, heads, rows, head size]")
        if tensor.device != Q.device:
            raise RuntimeError(f"{name}: is on {tensor.device}, but Q is on {Q.device}; all tensors must be on one device")
        if not tensor.dtype.is_floating_point:
            raise RuntimeError(f"{name}: is {tensor.dtype}; it must be float16, bfloat16, float32 or float64")
    if K.shape[:1] != Q.shape[:1] or V.shape[:1] != Q.shape[:1]:
        raise RuntimeError(f"Q, K, V: have {Q.shape[0]}, {K.shape[0]} and {V.shape[0]} batch entries; they must have the same number")
    if K.dtype != Q.dtype:
        raise RuntimeError(f"K: is {K.dtype}, but Q is {Q.dtype}")
    if K.shape[3] != Q.shape[3]:
        raise RuntimeError(f"K: has head size {K.shape[3]}, but Q has {Q.shape[3]}")
    if V.shape[1:3] != K.shape[1:3]:
        raise RuntimeError(f"V: has {V.shape[1]} heads and {V.shape[2]} rows, but K has {K.shape[1]} and {K.shape[2]}")
    if K.shape[1] == 0 or Q.shape[1] % K.shape[1]:
        raise RuntimeError(f"Q: has {Q.shape[1]} heads; they must be a multiple of the {K.shape[1]} of K")


def check_attributes(attributes: dict[str, Any], left_window_size: int, right_window_size: int) -> None:
    """The numbers that the op takes."""
    scale, softcap = attributes["scale"], attributes["softcap"]
    if scale is not None and not (math.isfinite(scale) and scale >= 0):
        raise RuntimeError(f"scale: is {scale}; it must be a finite number >= 0")
    if not (math.isfinite(softcap) and softcap >= 0):
        raise RuntimeError(f"softcap: is {softcap}; it must be a finite number >= 0")
    if attributes["softmax_precision"] not in (None, 1, 10, 11, 16):
        raise RuntimeError(f"softmax_precision: is {attributes['softmax_precision']}; allowed are 1, 10, 11 and 16")
    for name, size in (("left_window_size", left_window_size), ("right_window_size", right_window_size)):
        if size < -1:
            raise RuntimeError(f"{name}: is {size}; it must be >= -1")


def check_mask(attn_mask: Tensor, Q: Tensor, columns: int) -> None:
    """A mask of these query rows and at most so many columns."""
    shape, whole = list(attn_mask.shape), [*Q.shape[:3], columns]
    fits = 1 <= len(shape) <= 4 and shape[-1] <= columns
    if not fits or any(size not in (1, limit) for size, limit in zip(shape[-2::-1], whole[-2::-1], strict=False)):
        raise RuntimeError(f"attn_mask: has shape {shape}; it must align right to {whole}, axes but the last may be 1, the last shorter")
    if isinstance(attn_mask, DTensor) or attn_mask.device != Q.device:
        raise RuntimeError(f"attn_mask: must be a plain tensor on {Q.device}, like Q")
