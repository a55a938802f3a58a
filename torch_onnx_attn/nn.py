"""Small modules around the ops: projections, heads and an optional static cache. Shapes as in :mod:`torch_onnx_attn.ops`."""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops


class Attention(torch.nn.Module):
    """Multi-head attention with grouped key/value heads over ai.onnx::Attention.

    ``forward`` takes ``hidden`` [B, L, embed_dim] and returns [B, L, embed_dim]. Heads are 4-D views, so that tensor parallel
    wrappers that shrink the projections keep their meaning.

    Args:
        embed_dim: width of the input and output.
        num_heads: query heads.
        num_kv_heads: key/value heads; default num_heads.
        head_size: default ``embed_dim // num_heads``.
        bias: whether the projections have a bias.
        is_causal, scale, softcap, left_window_size, right_window_size: as for :func:`torch_onnx_attn.attention`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_size: int | None = None,
        *,
        bias: bool = True,
        is_causal: bool = False,
        scale: float | None = None,
        softcap: float = 0.0,
        left_window_size: int = -1,
        right_window_size: int = -1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads <= 0 or kv_heads <= 0 or num_heads % kv_heads:
            raise ValueError(f"num_kv_heads: is {kv_heads}; num_heads = {num_heads} must be a positive multiple of it")
        if head_size is None and embed_dim % num_heads:
            raise ValueError(f"embed_dim: is {embed_dim}, which is not a multiple of num_heads = {num_heads}; give head_size")
        self.head_size = embed_dim // num_heads if head_size is None else head_size
        self.attributes = {
            "is_causal": is_causal,
            "scale": scale,
            "softcap": softcap,
            "left_window_size": left_window_size,
            "right_window_size": right_window_size,
        }
        self.q_proj = torch.nn.Linear(embed_dim, num_heads * self.head_size, bias, device, dtype)
        self.k_proj = torch.nn.Linear(embed_dim, kv_heads * self.head_size, bias, device, dtype)
        self.v_proj = torch.nn.Linear(embed_dim, kv_heads * self.head_size, bias, device, dtype)
        self.out_proj = torch.nn.Linear(num_heads * self.head_size, embed_dim, bias, device, dtype)

    def _heads(self, projected: Tensor) -> Tensor:
        batch, rows, hidden = projected.shape
        return projected.reshape(batch, rows, hidden // self.head_size, self.head_size).transpose(1, 2)

    def forward(
        self,
        hidden: Tensor,
        attn_mask: Tensor | None = None,
        nonpad_kv_seqlen: Tensor | None = None,
        key_cache: Tensor | None = None,
        value_cache: Tensor | None = None,
        cache_lengths: Tensor | None = None,
    ) -> Tensor:
        """Attends within ``hidden``, or with all three cache arguments also to what the static caches hold (and appends to them).

        Args:
            hidden: ``[B, L, embed_dim]``.
            attn_mask: as for :func:`torch_onnx_attn.attention`.
            nonpad_kv_seqlen: int64 ``[B]``, valid rows of ``hidden``; not with caches.
            key_cache, value_cache: ``[B, Hkv, capacity, head_size]``, written in place.
            cache_lengths: int64 ``[B]``, rows in use.
        """
        Q, K, V = self._heads(self.q_proj(hidden)), self._heads(self.k_proj(hidden)), self._heads(self.v_proj(hidden))
        given = [cache is not None for cache in (key_cache, value_cache, cache_lengths)]
        if any(given):
            if not all(given):
                raise ValueError("key_cache, value_cache, cache_lengths: must be given together")
            if nonpad_kv_seqlen is not None:
                raise ValueError("nonpad_kv_seqlen: cannot be combined with caches, whose lengths say what is valid")
            assert key_cache is not None and value_cache is not None and cache_lengths is not None
            Y = ops.attention_cached(Q, K, V, key_cache, value_cache, cache_lengths, attn_mask=attn_mask, **self.attributes)  # type: ignore[arg-type]
        else:
            Y = torch.ops.onnx_attn.attention.default(Q, K, V, attn_mask, nonpad_kv_seqlen=nonpad_kv_seqlen, **self.attributes)
        output: Tensor = self.out_proj(Y.transpose(1, 2).flatten(2))
        return output


class MultiHeadAttention(torch.nn.Module):
    """Multi-head attention over com.microsoft::MultiHeadAttention, its projection biases inside the operator.

    ``forward`` takes query [B, L, embed_dim] (and optionally key and value [B, S, embed_dim]) and returns [B, L, embed_dim].

    Args:
        embed_dim: width; a multiple of num_heads.
        num_heads: heads.
        bias: whether query, key, value and output projections have a bias.
        scale, mask_filter_value, unidirectional: as for :func:`torch_onnx_attn.mha`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        bias: bool = True,
        scale: float = 0.0,
        mask_filter_value: float = -10000.0,
        unidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_heads <= 0 or embed_dim % num_heads:
            raise ValueError(f"embed_dim: is {embed_dim}, which is not a multiple of num_heads = {num_heads}")
        self.attributes = {
            "num_heads": num_heads,
            "scale": scale,
            "mask_filter_value": mask_filter_value,
            "unidirectional": unidirectional,
        }
        self.q_proj = torch.nn.Linear(embed_dim, embed_dim, False, device, dtype)
        self.k_proj = torch.nn.Linear(embed_dim, embed_dim, False, device, dtype)
        self.v_proj = torch.nn.Linear(embed_dim, embed_dim, False, device, dtype)
        self.in_proj_bias = torch.nn.Parameter(torch.zeros(3 * embed_dim, device=device, dtype=dtype)) if bias else None
        self.out_proj = torch.nn.Linear(embed_dim, embed_dim, bias, device, dtype)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attention_bias: Tensor | None = None,
    ) -> Tensor:
        """Self-attention, or cross-attention when key (and optionally value, default key) is given.

        Args:
            query: ``[B, L, embed_dim]``.
            key, value: ``[B, S, embed_dim]``.
            key_padding_mask: as for :func:`torch_onnx_attn.mha`: 1 (or True) *keeps*, unlike ``torch.nn.MultiheadAttention``.
            attention_bias: ``[B or 1, num_heads or 1, L, S]``.
        """
        key = query if key is None else key
        value = key if value is None else value
        output = torch.ops.onnx_attn.mha.default(
            self.q_proj(query),
            self.k_proj(key),
            self.v_proj(value),
            self.in_proj_bias,
            key_padding_mask,
            attention_bias,
            **self.attributes,
        )
        projected: Tensor = self.out_proj(output)
        return projected
