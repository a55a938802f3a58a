"""Is a result right? A few sampled (batch, head) pairs and rows against float64, and every number finite."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

from benchmarks.inputs import DTYPES, Inputs
from benchmarks.shapes import Line

# Relative error, ||out - ref|| / ||ref||. A peer is dropped when it is wrong, not when it is a little less accurate.
TOLERANCE = {"bf16": 1e-2, "fp16": 2e-3, "fp32": 2e-6}
PEER_FACTOR = 5
ROWS = 16
HEADS = 4


def poison(line: Line, device: str) -> None:
    """Leave NaN in the block of memory that the next output is likely to get, so that an unwritten element shows."""
    shape = (line.batch, line.q_heads, line.q_len, line.v_size)
    torch.full(shape, math.nan, dtype=DTYPES[line.dtype], device=device)


def relative_error(line: Line, inputs: Inputs, result: tuple[Tensor, ...]) -> float:
    """The worst relative error among the outputs of one call. `result`: Y as [batch, heads, rows, size], then the others."""
    if line.call == "tensor_scatter_":
        return _scatter_error(inputs)
    y = result[0]
    if not bool(torch.isfinite(y).all()):
        return math.inf
    draw = random.Random(7)
    heads = {(0, 0), (line.batch - 1, line.q_heads - 1)}
    heads |= {(draw.randrange(line.batch), draw.randrange(line.q_heads)) for _ in range(HEADS - 2)}
    rows = sorted({0, line.q_len - 1} | {draw.randrange(line.q_len) for _ in range(ROWS)})
    pairs = []
    for batch, head in sorted(heads):
        expected_y, stages = reference_rows(line, inputs, batch, head, rows)
        pairs.append((y[batch, head, rows], expected_y))
        if line.mode is not None:
            pairs.append((result[1][batch, head, rows], stages[line.mode]))
        if not _caches_are_exact(line, inputs, result, batch, head * line.kv_heads // line.q_heads):
            return math.inf
    return max(_distance(got.double(), expected) for got, expected in pairs)


def reference_rows(line: Line, inputs: Inputs, batch: int, head: int, rows: list[int]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Y of some rows in float64 [rows, v_size], and the four score stages of qk_matmul_output_mode [rows, kv_len]."""
    keys, values = _keys_values(line, inputs, batch, head * line.kv_heads // line.q_heads)
    kv_len = keys.shape[0]
    length = kv_len if inputs.lengths is None else int(inputs.lengths[batch])
    offset = line.past if inputs.lengths is None else length - line.q_len
    key = torch.arange(kv_len, device=keys.device)
    position = torch.tensor(rows, device=keys.device)[:, None] + offset

    raw = inputs.q[batch, head, rows].double() @ keys.T / math.sqrt(line.head_size)
    capped = line.softcap * torch.tanh(raw / line.softcap) if line.softcap else raw
    keep = (key < length).expand(len(rows), -1)
    if line.causal:
        keep = keep & (key <= position)
    if line.window >= 0:
        keep = keep & (key >= position - line.window)
    if inputs.key_lengths is not None:
        keep = keep & (key < inputs.key_lengths[batch])
    logits = capped
    if inputs.mask is not None:
        mask = inputs.mask.expand(line.batch, line.q_heads, line.q_len, kv_len)[batch, head, rows]
        keep, logits = (keep & mask, logits) if mask.dtype == torch.bool else (keep, logits + mask.double())
    logits = logits.masked_fill(~keep, -math.inf)
    weights = torch.softmax(logits, -1).nan_to_num(0.0)
    return weights @ values, (raw, capped, logits, weights)


def _keys_values(line: Line, inputs: Inputs, batch: int, kv_head: int) -> tuple[Tensor, Tensor]:
    """All keys and values of one kv head in float64, new ones in their place."""
    k, v = inputs.k[batch, kv_head], inputs.v[batch, kv_head]
    if inputs.past_key is None or inputs.past_value is None:
        return k.double(), v.double()
    past_key, past_value = inputs.past_key[batch, kv_head], inputs.past_value[batch, kv_head]
    if inputs.positions is None:
        return torch.cat((past_key, k)).double(), torch.cat((past_value, v)).double()
    begin = int(inputs.positions[batch])
    keys, values = past_key.double(), past_value.double()
    keys[begin : begin + line.q_len], values[begin : begin + line.q_len] = k.double(), v.double()
    return keys, values


def _caches_are_exact(line: Line, inputs: Inputs, result: tuple[Tensor, ...], batch: int, kv_head: int) -> bool:
    """present_key and present_value, or the caches after attention_cached, hold exactly what they should."""
    if line.call == "attention.kv":
        held = result[1:3]
    elif line.call == "attention_cached":
        held = (inputs.past_key, inputs.past_value)
    else:
        return True
    expected = _keys_values(line, inputs, batch, kv_head)
    return all(torch.equal(cache[batch, kv_head].double(), rows) for cache, rows in zip(held, expected, strict=True))


def _scatter_error(inputs: Inputs) -> float:
    assert inputs.cache is not None and inputs.positions is not None
    for batch, begin in enumerate(inputs.positions.tolist()):
        if not torch.equal(inputs.cache[batch, :, begin : begin + inputs.q.shape[2]], inputs.q[batch]):
            return math.inf
    return 0.0


def _distance(got: Tensor, expected: Tensor) -> float:
    """||got - expected|| / ||expected||; cells that are -inf (masked scores) must be so in both."""
    masked = torch.isneginf(expected)
    if not torch.equal(torch.isneginf(got), masked):
        return math.inf
    difference = (got - expected).masked_fill(masked, 0.0).norm()
    error = float(difference / expected.masked_fill(masked, 0.0).norm().clamp_min(1e-30))
    return error if error == error else math.inf
