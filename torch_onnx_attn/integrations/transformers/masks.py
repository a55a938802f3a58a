"""The masks that transformers asks for, in as few numbers as say the same: `make_mask` builds them, `read_mask` takes them apart.

B = batch, L = query rows, S = keys. What `make_mask` returns, and the attention function receives:

=========================  ==========================================================================================
None                       no key is padding. The causality and the window of the call hold, aligned to key 0.
[B, S] bool                the same, and these keys are kept (True) or padding.
[B, n, 1, 1, S] bool       rows that are not the first ones of a cache. First the keys written so far: their number is the
                           length, on the device, and the last row sits at its end. Then, for n = 2, the keys kept.
4 axes, [B, 1, 1 or L, S]  complete: neither causality nor a window is added, since overlays may allow what they forbid.
=========================  ==========================================================================================

Only overlays, packed sequences, chunked attention and most bidirectional windows need L * S numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from .errors import UnsupportedError

# transformers' window to both sides counts the keys before a row, the window that it passes to a layer one more, its own. These
# models say so; others (T5Gemma) pass the former number, and only their masks are right.
_PASS_BOTH_SIDES = ("modernbert",)


class KeyMask(NamedTuple):
    """A mask as the op takes it.

    Attributes:
        attn_mask: bool or floating, right-aligned to [B, Hq, L, S]; None if every key counts.
        lengths: int64 [B], on the device; None if all keys are written.
        is_complete: neither causality nor a window may be added.
    """

    attn_mask: Tensor | None
    lengths: Tensor | None
    is_complete: bool


def read_mask(attention_mask: Tensor | None) -> KeyMask:
    """Takes apart what `make_mask`, a model or the user made. Raises `UnsupportedError` for what none of them makes."""
    if attention_mask is None:
        return KeyMask(None, None, is_complete=False)
    if not isinstance(attention_mask, Tensor):
        raise UnsupportedError(f"attention_mask: is a {type(attention_mask).__name__}; a tensor is expected")
    rank = attention_mask.dim()
    if rank == 4 and (attention_mask.dtype == torch.bool or attention_mask.is_floating_point()):
        return KeyMask(attention_mask, None, is_complete=True)
    if rank not in (2, 5) or attention_mask.dtype != torch.bool:
        kind = f"{list(attention_mask.shape)} of {attention_mask.dtype}"
        allowed = "bool [batch, keys], or [batch, heads or 1, rows or 1, keys] of bool or floating type"
        raise UnsupportedError(f"attention_mask: is {kind}; allowed are {allowed}")
    if rank == 2:
        return KeyMask(attention_mask[:, None, None, :], None, is_complete=False)
    written, *kept = attention_mask.unbind(1)
    lengths = torch.ops.onnx_attn.valid_kv_length.default(written)
    return KeyMask(kept[0] if kept else None, lengths, is_complete=False)


def make_mask(
    *,
    batch_size: int,
    kv_length: int,
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    cache_position: Tensor | None = None,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Tensor | None:
    """The mask of some layers for one step, in the forms above. transformers calls this with keywords, as registered.

    Args:
        batch_size, q_length, kv_length: B, L and S.
        q_offset: position of the first query row; a tensor where the cache keeps its length on the device, which is never read here.
        kv_offset: position of the first key, where a cache has dropped those before it.
        cache_position: positions of all rows [L], what transformers 5.0 gives for q_length and q_offset.
        mask_function: transformers' rule for one (row, key).
        attention_mask: bool [B, any]: True for tokens, False for padding; missing columns are padding. Or an earlier result.
        local_size: the window or chunk in mask_function.
        allow_is_causal_skip: mask_function is plainly causal, with the window if there is one. transformers clears it for overlays.
        allow_is_bidirectional_skip: the same for plainly bidirectional ones.
        config: of the model.
        device: where the mask goes.
        others: for transformers' own `sdpa_mask`, which makes the dense ones.
    """
    if attention_mask is not None and attention_mask.dim() == 5:
        return attention_mask  # generate() prepared it for this very step
    rows: dict[str, Any] = {"q_length": q_length, "q_offset": q_offset}
    if cache_position is not None:
        rows = {"cache_position": cache_position}
        q_length, q_offset = cache_position.shape[0], cache_position[0]
        device = cache_position.device
    if q_length is None:
        raise TypeError("q_length: is missing")
    padding = None if attention_mask is None else _key_padding(attention_mask, batch_size, kv_length, kv_offset)

    def dense() -> Tensor:
        made = sdpa_mask(
            batch_size=batch_size,
            kv_length=kv_length,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            device=device,
            **rows,
            **others,
        )
        assert isinstance(made, Tensor)
        return made

    def stack(kept: Tensor | None) -> Tensor:
        written = torch.arange(kv_length, device=device) < q_offset + q_length - kv_offset
        written = written.expand(batch_size, kv_length)
        return torch.stack([written] if kept is None else [written, kept], 1)[:, :, None, None]

    window_matters = local_size is not None and (torch.compiler.is_compiling() or kv_length > local_size)
    if allow_is_bidirectional_skip:
        if mask_function is bidirectional_mask_function or not window_matters:
            return None if padding is None or _is_known_full(padding) else padding[:, None, None, :]
        if getattr(config, "model_type", None) in _PASS_BOTH_SIDES and _is_window(config, local_size):
            return None if padding is None or _is_known_full(padding) else padding

    is_plain = allow_is_causal_skip and (local_size is None or _is_window(config, local_size))
    if isinstance(q_offset, Tensor):
        if q_length == 1:  # transformers clears allow_is_causal_skip here, so that only the function itself tells
            return stack(padding if mask_function is causal_mask_function else dense()[:, 0, 0])
        return stack(padding) if is_plain else dense()
    if is_plain and q_length > 1:
        if q_offset == 0 and kv_offset == 0:
            return None if padding is None or _is_known_full(padding[:, :q_length]) else padding
        return stack(None if padding is None or _is_known_full(padding) else padding)
    if is_plain and not window_matters and q_offset + 1 - kv_offset == kv_length:
        return None if padding is None or _is_known_full(padding) else padding[:, None, None, :]
    return dense()


def _key_padding(attention_mask: Tensor, batch_size: int, kv_length: int, kv_offset: int) -> Tensor:
    """bool [B, S] out of bool [B, any]."""
    if attention_mask.dim() != 2:
        given = list(attention_mask.shape)
        raise UnsupportedError(f"attention_mask: is {given}; allowed are [batch, tokens], or 4 axes for a mask of one's own")
    if attention_mask.shape[0] != batch_size:
        raise UnsupportedError(f"attention_mask: has {attention_mask.shape[0]} rows for a batch of {batch_size}")
    columns = attention_mask[:, kv_offset : kv_offset + kv_length]
    missing = kv_length - columns.shape[1]
    return pad(columns, (0, missing)).to(torch.bool) if missing > 0 else columns.to(torch.bool)


def _is_window(config: Any, local_size: int | None) -> bool:
    """Whether local_size is a sliding window. transformers gives the size of chunks under the same name."""
    return bool(getattr(config, "sliding_window", None) == local_size != getattr(config, "attention_chunk_size", None))


def _is_known_full(padding: Tensor) -> bool:
    """Whether the host may look, and finds no padding. It looks at most once for each mask of a forward pass."""
    tracing = torch.compiler.is_compiling() or isinstance(padding, torch._subclasses.FakeTensor)
    if tracing or padding.is_meta or (padding.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return bool(padding.all())
