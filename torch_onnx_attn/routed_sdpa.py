"""torch.nn.functional.scaled_dot_product_attention said with torch.ops.onnx_attn.attention, or the reason why not.

Both functions have SDPA's own signature. Both are also traced by torch.compile and torch.export, with symbolic sizes: these are only
compared where the comparison needs no guard, or where torch's own function would add the same one.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def reason_to_leave(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> str | None:
    """Why a call cannot be routed, None if it can. What torch refuses is left as well, so that its own error is raised."""
    if dropout_p != 0.0:
        return f"dropout_p is {dropout_p}; these ops have no dropout"
    reason = reason_of_tensors(query, key, value, attn_mask)
    if reason is not None:
        return reason
    if not 2 <= query.dim() == key.dim() == value.dim():
        return "query, key and value do not have the same number of axes, 2 or more"
    if attn_mask is not None and is_causal:
        return "attn_mask is given with is_causal, which torch refuses in some of its kernels"
    if attn_mask is not None and not 2 <= attn_mask.dim() <= query.dim():
        return "attn_mask has fewer than 2 axes, or more than query"
    if attn_mask is not None and differ(attn_mask.shape[-1], key.shape[-2]) and differ(attn_mask.shape[-1], 1):
        return "the last axis of attn_mask is neither the number of keys nor 1, which torch refuses"
    if attn_mask is not None and attn_mask.dtype != torch.float32 and not mask_dtype_fits(attn_mask, query):
        return f"attn_mask is {attn_mask.dtype}, neither bool nor float32 nor query's dtype, which torch refuses"
    if scale is not None and not 0 <= scale <= torch.finfo(torch.float32).max:
        return f"scale is {scale}; these ops take numbers from 0 to float32's largest"
    if statically_known_true(query.shape[-1] == 0) or statically_known_true(value.shape[-1] == 0):
        return "the head size is 0"
    if query.dim() == 2 and enable_gqa:
        return "enable_gqa is given without an axis of heads, which torch refuses"
    if query.dim() > 2 and not _heads_fit(query.shape[-3], key.shape[-3], value.shape[-3], enable_gqa):
        return "the head counts of query, key and value do not go together"
    if not (_batches_fit(query, key) and _batches_fit(query, value)):
        return "the batch axes of key or value are neither query's nor 1"
    return None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The call on ``torch.ops.onnx_attn.attention``. SDPA's causal alignment is top-left, as the op's without cache or lengths."""
    Q, K, V = _four_axes(query), _four_axes(_repeated(key, query)), _four_axes(_repeated(value, query))
    mask = None if attn_mask is None else _four_axis_mask(attn_mask, query, key.shape[-2])
    Y: Tensor = torch.ops.onnx_attn.attention.default(Q, K, V, mask, is_causal=is_causal, scale=scale)
    if query.dim() == 4:
        return Y
    return Y.reshape(*query.shape[:-1], value.shape[-1])


def reason_of_tensors(*tensors: Tensor | None) -> str | None:
    """Why these tensors are not for our ops: all operands of a call, the first three being query, key and value."""
    given = [tensor for tensor in tensors if tensor is not None]
    if not torch.compiler.is_compiling():
        reason = _reason_of_surroundings(given)
        if reason is not None:
            return reason
    distributed = sys.modules.get("torch.distributed.tensor")
    for tensor in given:
        if not isinstance(tensor, Tensor):
            return "an argument is not a tensor"
        if tensor.is_nested or tensor.layout != torch.strided:
            return "an argument is a nested or sparse tensor"
        if distributed is not None and isinstance(tensor, distributed.DTensor):
            return "an argument is a distributed tensor"
        if tensor.requires_grad and torch.is_grad_enabled() and not is_exporting():
            return "a gradient may be wanted (these ops are forward only): call it under torch.inference_mode() or torch.no_grad()"
    query, key, value = given[:3]
    if query.device.type not in ("cpu", "cuda", "meta"):
        return f"the tensors are on {query.device.type}; these ops run on cpu and cuda"
    if query.device.type == "cuda" and not _built_for_cuda():
        return "the tensors are on cuda and the library was built without CUDA kernels"
    if query.dtype not in _DTYPES or key.dtype not in _DTYPES or value.dtype not in _DTYPES:
        return "query, key and value are not float16, bfloat16, float32 or float64"
    if not (query.dtype == key.dtype == value.dtype or torch.is_autocast_enabled(query.device.type)):
        return "query, key and value have different dtypes, which torch refuses"
    return None


def _reason_of_surroundings(tensors: list[Tensor]) -> str | None:
    """What only eager code can be inside of."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return "torch.jit.trace and torch.onnx.export(dynamo=False) are not supported"
    if any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors if isinstance(tensor, Tensor)):
        return "a torch.func transform is at work, for which these ops have no rules"
    if getattr(forward_ad, "_current_level", -1) >= 0:
        return "forward-mode derivatives may be wanted (these ops have none)"
    return None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_exporting() -> bool:
    """Whether a graph is being captured by torch.export or torch.onnx.export, in which nothing will ask for gradients.

    Evaluated outside the traced code: torch.compile of torch 2.11 takes torch.compiler.is_exporting() for true.
    """
    return torch.compiler.is_exporting() or torch.onnx.is_in_onnx_export()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _built_for_cuda() -> bool:
    state, *_architectures = torch.ops.onnx_attn._build_info()
    return bool(state == 2)


def _heads_fit(query: Any, key: Any, value: Any, enable_gqa: bool) -> bool:
    if statically_known_true(key == 1) and statically_known_true(value == 1):
        return True
    return bool(key == value and (query == key or (enable_gqa and key > 0 and query % key == 0)))


def _batches_fit(query: Tensor, tensor: Tensor) -> bool:
    """False where sizes are known to differ; what cannot be known while capturing is checked by the op."""
    sizes = zip(query.shape[:-3], tensor.shape[:-3], strict=True)
    return not any(statically_known_true(wanted != size) and not statically_known_true(size == 1) for wanted, size in sizes)


def differ(size: Any, other: Any) -> bool:
    """Whether two sizes of a mask's axis differ. A captured graph keeps the answer as a guard: the op broadcasts what torch refuses."""
    return bool(guard_or_false(size != other))


def mask_dtype_fits(mask: Tensor, query: Tensor) -> bool:
    """Whether torch takes a mask of this dtype in every one of its kernels. Autocast converts all but float64."""
    if mask.dtype in (torch.bool, query.dtype):
        return True
    return mask.is_floating_point() and mask.dtype != torch.float64 and torch.is_autocast_enabled(query.device.type)


def _four_axes(tensor: Tensor) -> Tensor:
    """[..., heads, rows, columns] as [batch, heads, rows, columns]."""
    if tensor.dim() > 4:
        return tensor.flatten(0, -4)
    for _ in range(4 - tensor.dim()):
        tensor = tensor.unsqueeze(0)
    return tensor


def _repeated(tensor: Tensor, query: Tensor) -> Tensor:
    """Batch axes of size 1 as wide as the query's. Nothing is copied: the op reads any stride."""
    batch = tensor.shape[:-3]
    if not any(statically_known_true(size == 1) for size in batch):
        return tensor
    wide = [wanted if statically_known_true(size == 1) else size for size, wanted in zip(batch, query.shape[:-3], strict=True)]
    return tensor.expand(*wide, *tensor.shape[-3:])


def _four_axis_mask(mask: Tensor, query: Tensor, columns: Any) -> Tensor:
    """A mask that broadcasts to [..., heads, rows, columns] as one of at most four axes that says the same here.

    A last axis of size 1 means the first key alone to the op, so it is expanded. While exporting a row axis of size 1 is too, since
    ONNX Runtime's native Attention kernels refuse it.
    """
    if statically_known_true(mask.shape[-1] == 1) and not statically_known_true(columns == 1):
        mask = mask.expand(*mask.shape[:-1], columns)
    if is_exporting():
        mask = mask_with_rows(mask, query.shape[-2])
    if query.dim() > 4 and mask.dim() > 3:
        if all(statically_known_true(size == 1) for size in mask.shape[:-3]):
            return mask.reshape(mask.shape[-3:])
        return mask.expand(*query.shape[:-3], *mask.shape[-3:]).flatten(0, -4)
    return mask


def mask_with_rows(mask: Tensor, rows: Any) -> Tensor:
    """A mask of one row as one of ``rows`` equal rows."""
    if statically_known_true(mask.shape[-2] == 1) and not statically_known_true(rows == 1):
        return mask.expand(*mask.shape[:-2], rows, mask.shape[-1])
    return mask
