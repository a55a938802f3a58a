"""Random inputs of a line, always in [batch, heads, length, size] form; the 3-D lines store them as [batch, length, heads * size]."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.accounting import kv_bytes, lengths_of
from benchmarks.shapes import Line

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROTATED_BYTES = 256 << 20  # several times the L2 of any current GPU: a set is cold again when its turn comes


@dataclass
class Inputs:
    q: Tensor  # [batch, q_heads, q_len, head_size]; tensor_scatter_: the update
    k: Tensor  # [batch, kv_heads, new_len, head_size]: all the keys, or the new ones where there is a past or a cache
    v: Tensor
    mask: Tensor | None = None  # attn_mask
    lengths: Tensor | None = None  # int64 [batch]: nonpad_kv_seqlen; attention_cached: the lengths after the call
    key_lengths: Tensor | None = None  # int32 [batch]: key padding, behind a "keys" mask or as an mha mask
    past_key: Tensor | None = None  # past_key and past_value, or the caches of attention_cached
    past_value: Tensor | None = None
    cache: Tensor | None = None  # tensor_scatter_: [batch, kv_heads, kv_len, head_size]
    positions: Tensor | None = None  # int64 [batch]: where tensor_scatter_ and attention_cached write

    def forget_writes(self) -> None:
        """Spoil what in-place calls write, so that a call that writes nothing cannot pass the check."""
        if self.cache is not None:
            self.cache.zero_()
        elif self.positions is not None and self.past_key is not None and self.past_value is not None:
            rows = slice(int(self.positions[0]), int(self.positions[0]) + self.k.shape[2])
            self.past_key[:, :, rows] = 0
            self.past_value[:, :, rows] = 0


def count_sets(line: Line) -> int:
    """How many input sets a line rotates through: enough to defeat the L2 when steps are chained, else one."""
    if "chained" not in line.methods:
        return 1
    return min(max(2, -(-ROTATED_BYTES // max(1, kv_bytes(line)))), 12)


def make_inputs(line: Line, device: str) -> list[Inputs]:
    torch.manual_seed(zlib.crc32(line.name.encode()))
    return [_make_one(line, device) for _ in range(count_sets(line))]


def _make_one(line: Line, device: str) -> Inputs:
    def normal(heads: int, length: int, size: int) -> Tensor:
        if line.call == "mha":
            return torch.randn(line.batch, length, heads, size, device=device, dtype=DTYPES[line.dtype]).transpose(1, 2)
        return torch.randn(line.batch, heads, length, size, device=device, dtype=DTYPES[line.dtype])

    def integers(values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    if line.call == "tensor_scatter_":
        update = normal(line.kv_heads, line.q_len, line.head_size)
        cache = normal(line.kv_heads, line.kv_len, line.head_size)
        positions = torch.randint(0, line.kv_len - line.q_len + 1, (line.batch,), device=device)
        return Inputs(update, update, update, cache=cache, positions=positions)

    held = line.kv_len if line.call == "attention_cached" else line.past
    new_len = line.q_len if line.call == "attention_cached" else line.kv_len - line.past
    made = Inputs(
        normal(line.q_heads, line.q_len, line.head_size),
        normal(line.kv_heads, new_len, line.head_size),
        normal(line.kv_heads, new_len, line.v_size),
    )
    if held:
        made.past_key = normal(line.kv_heads, held, line.head_size)
        made.past_value = normal(line.kv_heads, held, line.v_size)
    if line.lengths is not None:
        made.lengths = integers(lengths_of(line))
    if line.call == "attention_cached":
        made.positions = integers([length - line.q_len for length in lengths_of(line)])
    _add_mask(line, made, device)
    return made


def _add_mask(line: Line, made: Inputs, device: str) -> None:
    kind, _, axes = line.mask.partition(":")
    if not kind:
        return
    if kind in ("keys", "lengths"):
        made.key_lengths = torch.randint(min(64, line.kv_len), line.kv_len + 1, (line.batch,), device=device, dtype=torch.int32)
        if kind == "keys":
            made.mask = key_mask(made.key_lengths, line.kv_len)
        return
    sizes = {"B": line.batch, "H": line.q_heads, "Q": line.q_len, "K": line.kv_len, "1": 1}
    shape = [sizes[axis] for axis in axes]
    if kind == "bias":
        made.mask = torch.randn(shape, device=device, dtype=DTYPES[line.dtype])
    else:
        made.mask = torch.rand(shape, device=device) > 0.3


def key_mask(lengths: Tensor, kv_len: int) -> Tensor:
    """bool [batch, 1, 1, kv_len]: True for the keys before each row's length."""
    return (torch.arange(kv_len, device=lengths.device) < lengths[:, None])[:, None, None, :]
