"""Small modules around the ops: attention with its projections, and a static cache. Shapes as in :mod:`torch_onnx_attn.ops`."""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
            raise ValueError(f"{name}: is {size!r}, must be a positive integer")


def _check_hidden(name: str, hidden: Tensor, width: int) -> None:
    if not isinstance(hidden, Tensor) or hidden.dim() != 3 or hidden.shape[2] != width:
        raise ValueError(f"{name}: is {_kind(hidden)}, must be a tensor [batch, rows, embed_dim = {width}]")


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
        _check_sizes(embed_dim=embed_dim, num_heads=num_heads, num_kv_heads=kv_heads)
        if num_heads % kv_heads:
            raise ValueError(f"num_kv_heads: is {kv_heads}; num_heads = {num_heads} must be a multiple of it")
        if head_size is None and embed_dim % num_heads:
            raise ValueError(f"embed_dim: is {embed_dim}, which is not a multiple of num_heads = {num_heads}; give head_size")
        self.embed_dim = embed_dim
        self.head_size = embed_dim // num_heads if head_size is None else head_size
        _check_sizes(head_size=self.head_size)
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
        _check_hidden("hidden", hidden, self.embed_dim)
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
        _check_sizes(embed_dim=embed_dim, num_heads=num_heads)
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim: is {embed_dim}, which is not a multiple of num_heads = {num_heads}")
        self.embed_dim = embed_dim
        self.head_size = embed_dim // num_heads
        self.attributes = {
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
        for name, hidden in (("query", query), ("key", key), ("value", value)):
            _check_hidden(name, hidden, self.embed_dim)
        projected_query = self.q_proj(query)
        output = torch.ops.onnx_attn.mha.default(
            projected_query,
            self.k_proj(key),
            self.v_proj(value),
            self.in_proj_bias,
            key_padding_mask,
            attention_bias,
            num_heads=projected_query.shape[-1] // self.head_size,  # this rank's heads, where the projections are split over ranks
            **self.attributes,
        )
        projected: Tensor = self.out_proj(output)
        return projected


class KVCache(torch.nn.Module):
    """Static key and value caches of all layers of a model, and how many rows of each batch entry are in use.

    A step attends once in each layer, which writes the layer's new rows, and then advances once. All of it stays on the device:
    nothing is read by the host, so that a step can be compiled and captured in a CUDA graph, and replayed while lengths grow. In an
    ONNX file written by :func:`torch_onnx_attn.onnx.export_static_cache` each write is a TensorScatter and each attention an Attention
    with ``nonpad_kv_seqlen``.

    The buffers follow the module's ``to()`` and are no part of its ``state_dict``. Not-a-number past the lengths is harmless here, but
    not in ONNX Runtime, so the caches start at zero.

    Args:
        layers: how many pairs of caches.
        batch: batch entries.
        kv_heads: key/value heads.
        capacity: rows of each cache, the longest sequence that fits.
        head_size: columns of the key caches.
        v_head_size: columns of the value caches; default head_size.

    Attributes:
        lengths: int64 ``[batch]``, rows in use.
    """

    lengths: Tensor

    def __init__(
        self,
        layers: int,
        batch: int,
        kv_heads: int,
        capacity: int,
        head_size: int,
        v_head_size: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        v_head_size = head_size if v_head_size is None else v_head_size
        _check_sizes(layers=layers, batch=batch, kv_heads=kv_heads, capacity=capacity, head_size=head_size, v_head_size=v_head_size)
        if dtype is not None and dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise ValueError(f"dtype: is {dtype}, must be float16, bfloat16, float32 or float64")
        self.layers = layers
        self.capacity = capacity
        for layer in range(layers):
            for name, columns in (("key", head_size), ("value", v_head_size)):
                buffer = torch.zeros(batch, kv_heads, capacity, columns, device=device, dtype=dtype)
                self.register_buffer(f"{name}_{layer}", buffer, persistent=False)
        self.register_buffer("lengths", torch.zeros(batch, dtype=torch.int64, device=device), persistent=False)

    def key(self, layer: int) -> Tensor:
        """The key cache of a layer: ``[batch, kv_heads, capacity, head_size]``."""
        return self._cache("key", layer)

    def value(self, layer: int) -> Tensor:
        """The value cache of a layer: ``[batch, kv_heads, capacity, v_head_size]``."""
        return self._cache("value", layer)

    def _cache(self, name: str, layer: int) -> Tensor:
        if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < self.layers:
            raise IndexError(f"layer: is {layer!r}, must be 0 to {self.layers - 1}")
        cache: Tensor = getattr(self, f"{name}_{layer}")
        return cache

    def positions(self, rows: int) -> Tensor:
        """The positions of this step's rows, for position embeddings: int64 ``[batch, rows]``."""
        _check_rows(rows, "an integer from 0 on")
        return self.lengths[:, None] + torch.arange(rows, device=self.lengths.device)

    def append(self, layer: int, K: Tensor, V: Tensor) -> None:
        """Writes this step's keys and values without attending: K ``[B, Hkv, S, D]``, V ``[B, Hkv, S, Dv]``.

        :meth:`attend` with K and V does both by one kernel.

        Raises:
            ValueError: K or V does not go with the caches, or with each other; nothing is written then.
            RuntimeError: on the CPU, if rows do not fit. On CUDA rows that do not fit are dropped.
        """
        keys, values = self.key(layer), self.value(layer)
        for name, new, cache in (("K", K, keys), ("V", V, values)):
            allowed = [*cache.shape[:2], K.shape[2] if isinstance(K, Tensor) and K.dim() == 4 else "rows", cache.shape[3]]
            if not isinstance(new, Tensor) or new.dim() != 4 or list(new.shape) != allowed or new.dtype != cache.dtype:
                raise ValueError(f"{name}: is {_kind(new)}, must be {cache.dtype} [{', '.join(map(str, allowed))}]")
        if isinstance(K.shape[2], int) and K.shape[2] > self.capacity:
            raise ValueError(f"K: has {K.shape[2]} rows, must have at most the capacity of {self.capacity}")
        ops.tensor_scatter_(keys, K, self.lengths)
        ops.tensor_scatter_(values, V, self.lengths)

    def attend(
        self,
        layer: int,
        Q: Tensor,
        K: Tensor | None = None,
        V: Tensor | None = None,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = True,
        scale: float | None = None,
        softcap: float = 0.0,
        left_window_size: int = -1,
        right_window_size: int = -1,
    ) -> Tensor:
        """Attends to the valid rows of a layer's caches and to this step's own, after writing K and V there if they are given.

        Args:
            layer: whose caches.
            Q: ``[B, Hq, L, D]``, the queries of this step's L rows.
            K, V: ``[B, Hkv, L, D]`` and ``[B, Hkv, L, Dv]``; both or none. None where :meth:`append` has written this step's rows, as
                when a layer borrows the cache of another.
            attn_mask: as for :func:`torch_onnx_attn.attention`, over the capacity.
            is_causal: row i of this step sees ``lengths[b] + i + 1`` keys.
            scale, softcap, left_window_size, right_window_size: as for :func:`torch_onnx_attn.attention`.

        Returns:
            ``[B, Hq, L, Dv]``.

        Raises:
            ValueError, RuntimeError: naming the argument; on the CPU also if rows do not fit. On CUDA rows that do not fit are dropped.
        """
        if (K is None) != (V is None):
            raise ValueError("K, V: must be given together, or neither")
        if not isinstance(Q, Tensor) or Q.dim() != 4:
            raise ValueError(f"Q: is {_kind(Q)}, must be a tensor [batch, heads, rows, head_size]")
        if isinstance(K, Tensor) and K.dim() == 4 and K.shape[2] != Q.shape[2]:
            raise ValueError(f"K: has {K.shape[2]} rows, must have the {Q.shape[2]} of Q")
        keys, values = self.key(layer), self.value(layer)
        attributes = {
            "is_causal": is_causal,
            "scale": scale,
            "softcap": softcap,
            "left_window_size": left_window_size,
            "right_window_size": right_window_size,
        }
        if K is not None and V is not None:
            return ops.attention_cached(Q, K, V, keys, values, self.lengths, attn_mask=attn_mask, **attributes)  # type: ignore[arg-type]
        valid = self.lengths + Q.shape[2]
        Y: Tensor = torch.ops.onnx_attn.attention.default(Q, keys, values, attn_mask, nonpad_kv_seqlen=valid, **attributes)
        return Y

    def advance(self, rows: int | Tensor) -> None:
        """Counts this step's rows as valid, once all layers have attended.

        Args:
            rows: how many, the same for all entries or int64 ``[batch]``: of prompts padded on the right, each prompt's length. The
                rows behind it are overwritten by the next step.

        Raises:
            ValueError: rows is negative, no integer, or a tensor of another shape.
        """
        if isinstance(rows, Tensor):
            self._check_entries("rows", rows)
        else:
            _check_rows(rows, "an integer from 0 on, or int64 [batch]")
        self.lengths.add_(rows)

    def reset(self, entries: Tensor | None = None) -> None:
        """Forgets all sequences, or those of the batch entries given as an int64 tensor of indices."""
        if entries is None:
            self.lengths.zero_()
            return
        if not isinstance(entries, Tensor) or entries.dtype != torch.int64 or entries.dim() != 1:
            raise ValueError(f"entries: is {_kind(entries)}, must be an int64 tensor of one axis")
        try:
            self.lengths.index_fill_(0, entries, 0)
        except IndexError as error:  # on the CPU only: elsewhere the host does not read them
            raise IndexError(f"entries: {error}, must be 0 to {self.lengths.shape[0] - 1}") from None

    def reorder(self, entries: Tensor) -> None:
        """Batch entry b continues the sequence of entry ``entries[b]``, as after a step of beam search.

        Args:
            entries: int64 ``[batch]``.
        """
        self._check_entries("entries", entries)
        for buffer in self.buffers():
            try:
                moved = buffer.index_select(0, entries)
            except IndexError as error:
                raise IndexError(f"entries: {error}, must be 0 to {self.lengths.shape[0] - 1}") from None
            buffer.copy_(moved)

    def _check_entries(self, name: str, numbers: Tensor) -> None:
        """One whole number for each batch entry."""
        if not isinstance(numbers, Tensor) or numbers.dtype not in (torch.int32, torch.int64) or numbers.shape != self.lengths.shape:
            raise ValueError(f"{name}: is {_kind(numbers)}, must be an int64 tensor of shape [batch] = {list(self.lengths.shape)}")

    def check(self) -> None:
        """Raises RuntimeError if a sequence has outgrown the capacity. On CUDA it waits for the device: not for a captured step."""
        longest, entry = (int(number) for number in self.lengths.max(0))
        if longest > self.capacity:
            raise RuntimeError(f"lengths: entry {entry} has {longest} rows, the capacity is {self.capacity}; rows beyond it are lost")


def _check_rows(rows: object, allowed: str) -> None:
    if not isinstance(rows, int | torch.SymInt) or isinstance(rows, bool) or rows < 0:
        raise ValueError(f"rows: is {rows!r}, must be {allowed}")


def _kind(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else f"of type {type(value).__name__}"
