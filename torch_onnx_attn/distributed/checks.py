"""What can be wrong with a rank's own tensors, found before anything is sent.

The op would find the same, but after its rank has taken part, when the others have what they need and return a result.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
ADDED = (*FLOATING, torch.int8, torch.int16, torch.int32, torch.int64, *UNSIGNED)
FLOAT32 = torch.finfo(torch.float32)  # what ONNX's attributes are


def check_plain(name: str, tensor: Tensor) -> None:
    """A tensor, and not one that says by itself how it lies on the ranks."""
    if isinstance(tensor, DTensor):
        raise RuntimeError(f"{name}: is a DTensor; give this rank's part as a plain tensor, as from to_local()")
    if not isinstance(tensor, Tensor):
        raise RuntimeError(f"{name}: is {tensor!r}; it must be a tensor")


def check_sent(name: str, tensor: Tensor, group: dist.ProcessGroup) -> None:
    """A plain tensor on a device that the group can send from."""
    check_plain(name, tensor)
    devices = [pair.partition(":")[0] for pair in str(dist.get_backend_config(group)).split(",")]
    if tensor.device.type not in devices:
        raise RuntimeError(f"{name}: is on {tensor.device}, but the group of mesh sends from {' and '.join(devices)} only")


def check_heads(Q: Tensor, K: Tensor, V: Tensor, group: dist.ProcessGroup) -> None:
    """Plain 4-D tensors on one device, that belong together but for their rows."""
    for name, tensor in (("Q", Q), ("K", K), ("V", V)):
        check_plain(name, tensor)
        if tensor.dim() != 4:
            raise RuntimeError(f"{name}: has shape {list(tensor.shape)}; it must have 4 axes, [batch, heads, rows, head size]")
        check_on(name, tensor, Q)
        if tensor.dtype not in FLOATING:
            raise RuntimeError(f"{name}: is {tensor.dtype}; it must be float16, bfloat16, float32 or float64")
        if tensor.shape[3] == 0:
            raise RuntimeError(f"{name}: has head size 0; it must be at least 1")
    check_sent("Q", Q, group)
    if K.shape[:1] != Q.shape[:1] or V.shape[:1] != Q.shape[:1]:
        raise RuntimeError(f"Q, K, V: have {Q.shape[0]}, {K.shape[0]} and {V.shape[0]} batch entries; they must have the same number")
    if K.dtype != Q.dtype:
        raise RuntimeError(f"K: is {K.dtype}, but Q is {Q.dtype}")
    if K.shape[3] != Q.shape[3]:
        raise RuntimeError(f"K: has head size {K.shape[3]}, but Q has {Q.shape[3]}")
    if V.shape[1:3] != K.shape[1:3]:
        raise RuntimeError(f"V: has {V.shape[1]} heads and {V.shape[2]} rows, but K has {K.shape[1]} and {K.shape[2]}")
    if Q.shape[1] % K.shape[1] if K.shape[1] else Q.shape[1]:
        raise RuntimeError(f"Q: has {Q.shape[1]} heads; they must be a multiple of the {K.shape[1]} of K")


def check_on(name: str, tensor: Tensor, Q: Tensor) -> None:
    check_plain(name, tensor)
    if tensor.device != Q.device:
        raise RuntimeError(f"{name}: is on {tensor.device}, but Q is on {Q.device}; all tensors must be on one device")


def check_attributes(attributes: dict[str, Any], left_window_size: int, right_window_size: int) -> None:
    """The numbers that the op takes."""
    scale, softcap = attributes["scale"], attributes["softcap"]
    if scale is not None and not 0 <= scale <= FLOAT32.max:
        raise RuntimeError(f"scale: is {scale}; it must be a finite float32 >= 0")
    if not (softcap == 0 or FLOAT32.smallest_normal <= softcap <= FLOAT32.max):
        raise RuntimeError(f"softcap: is {softcap}; it must be >= 0 (0 means no softcap) and a finite, normal float32")
    if attributes["softmax_precision"] not in (None, 1, 10, 11, 16):
        raise RuntimeError(f"softmax_precision: is {attributes['softmax_precision']}; allowed are 1, 10, 11 and 16")
    for name, size in (("left_window_size", left_window_size), ("right_window_size", right_window_size)):
        if size < -1:
            raise RuntimeError(f"{name}: is {size}; it must be >= -1")


def check_mask(attn_mask: Tensor, Q: Tensor, columns: int) -> None:
    """A mask of these query rows and at most so many columns."""
    check_on("attn_mask", attn_mask, Q)
    if attn_mask.dtype != torch.bool and attn_mask.dtype not in ADDED:
        raise RuntimeError(f"attn_mask: is {attn_mask.dtype}; allowed are bool, float16, bfloat16, float32, float64 and integers")
    shape, whole = list(attn_mask.shape), [*Q.shape[:3], columns]
    fits = 1 <= len(shape) <= 4 and shape[-1] <= columns
    if not fits or any(size not in (1, limit) for size, limit in zip(shape[-2::-1], whole[-2::-1], strict=False)):
        raise RuntimeError(f"attn_mask: has shape {shape}; it must align right to {whole}, axes but the last may be 1, the last shorter")


def check_written(name: str, cache: Tensor, apart_from: dict[str, Tensor]) -> None:
    """A cache that is written in place must have memory of its own."""
    if any(size > 1 and step == 0 for size, step in zip(cache.shape, cache.stride(), strict=True)):
        raise RuntimeError(f"{name}: is written in place, but an axis is expanded (stride 0); pass a tensor with storage of its own")
    if cache.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{name}: requires a gradient, but is written in place and onnx_attn is forward only; detach it")
    begin, end = _span(cache)
    for other, tensor in apart_from.items():
        first, last = _span(tensor)
        if max(begin, first) < min(end, last):
            raise RuntimeError(f"{other}: overlaps {name}, which is written in place; they must be different storage")


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses that a tensor reaches: from the first byte to behind the last one."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
