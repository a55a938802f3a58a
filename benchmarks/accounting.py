"""What a line amounts to: floating-point operations, bytes, and a time turned into the line's unit. Plain arithmetic."""

from __future__ import annotations

import math
import random

from benchmarks.shapes import Line

ELEMENT_SIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
LESS_IS_BETTER = ("ms", "us", "bytes")


def lengths_of(line: Line) -> list[int]:
    """Valid keys of each batch row. "log-uniform" draws from 1 to kv_len with a fixed seed, so every run has the same ones."""
    if line.lengths is None:
        return [line.kv_len] * line.batch
    if isinstance(line.lengths, int):
        return [line.lengths] * line.batch
    draw = random.Random(2026)
    return [max(1, round(math.exp(draw.uniform(0, math.log(line.kv_len))))) for _ in range(line.batch)]


def offset_of(line: Line, length: int) -> int:
    """Query i stands at key position i + offset (the rule of ai.onnx::Attention)."""
    if line.lengths is not None:
        return length - line.q_len
    return line.past


def key_range(line: Line, row: int, length: int) -> tuple[int, int]:
    """The keys [begin, end) that length, causality and window leave to one query row. Mask tensors do not count."""
    position = row + offset_of(line, length)
    begin = max(0, position - line.window) if line.window >= 0 else 0
    end = min(length, position + 1) if line.causal else length
    return begin, max(begin, end)


def pairs(line: Line) -> int:
    """Query-key pairs of one head, summed over the batch."""
    total = 0
    for length in lengths_of(line):
        for begin, end in (key_range(line, row, length) for row in range(line.q_len)):
            total += end - begin
    return total


def flops(line: Line) -> int:
    """A multiply and an add for every pair and element of both products."""
    return 2 * line.q_heads * pairs(line) * (line.head_size + line.v_size)


def keys_read(line: Line) -> int:
    """Keys that some query needs, summed over the batch."""
    return sum(key_range(line, line.q_len - 1, length)[1] - key_range(line, 0, length)[0] for length in lengths_of(line))


def kv_bytes(line: Line) -> int:
    """K and V as a call has to read them: once per kv head, valid keys only."""
    return keys_read(line) * line.kv_heads * (line.head_size + line.v_size) * ELEMENT_SIZE[line.dtype]


def mask_bytes(line: Line) -> int:
    kind, _, axes = line.mask.partition(":")
    if kind == "lengths" or not kind:
        return 0
    sizes = {"B": line.batch, "H": line.q_heads, "Q": line.q_len, "K": line.kv_len, "1": 1}
    return math.prod(sizes[axis] for axis in axes) * (ELEMENT_SIZE[line.dtype] if kind == "bias" else 1)


def moved_bytes(line: Line) -> int:
    """The fewest bytes the call can move: each input read once, each output written once (score lines: written ones only)."""
    element = ELEMENT_SIZE[line.dtype]
    q_rows = line.batch * line.q_heads * line.q_len
    y_bytes = q_rows * line.v_size * element
    if line.call == "attention.qk":
        return y_bytes + q_rows * line.kv_len * element
    kv_row = line.batch * line.kv_heads * (line.head_size + line.v_size) * element
    if line.call == "tensor_scatter_":
        return 2 * line.batch * line.kv_heads * line.q_len * line.head_size * element
    total = q_rows * line.head_size * element + y_bytes + kv_bytes(line) + mask_bytes(line)
    if line.call == "attention.kv":
        total += line.kv_len * kv_row  # present_key and present_value
    if line.call == "attention_cached":
        total += 2 * line.q_len * kv_row  # the new rows: read, and written into the cache
    return total


def value(line: Line, milliseconds: float) -> float:
    """The measured time in the line's unit. A line in bytes was measured in bytes."""
    if line.unit == "TFLOP/s":
        return flops(line) / milliseconds / 1e9
    if line.unit == "GB/s":
        return moved_bytes(line) / milliseconds / 1e6
    return milliseconds * 1e3 if line.unit == "us" else milliseconds


def ceiling_of(line: Line, ceilings: dict[str, float]) -> float | None:
    """The bound of the line in TFLOP/s or GB/s, from what this run measured."""
    if line.ceiling == "matmul":
        if line.dtype == "fp32":  # three TF32 products make one of float32 accuracy
            return ceilings["matmul_tf32_tflops"] / 3 if "matmul_tf32_tflops" in ceilings else None
        return ceilings.get(f"matmul_{line.dtype}_tflops")
    return ceilings.get(f"{line.ceiling}_gbs")


def ceiling_fraction(line: Line, milliseconds: float, ceilings: dict[str, float]) -> float | None:
    ceiling = ceiling_of(line, ceilings)
    if not ceiling or not milliseconds:
        return None
    achieved = flops(line) / milliseconds / 1e9 if line.ceiling == "matmul" else moved_bytes(line) / milliseconds / 1e6
    return achieved / ceiling


def ratio_to_best(unit: str, ours: float | None, peers: dict[str, float | None]) -> tuple[float | None, str | None]:
    """Ours against the best peer, above 1 when we win, and that peer's name."""
    measured = {name: value for name, value in peers.items() if value is not None}
    if ours is None or not measured:
        return None, None
    if unit in LESS_IS_BETTER:
        best = min(measured, key=lambda name: measured[name])
        least = 2**20 if unit == "bytes" else 0  # below a megabyte, memory counts as a megabyte
        return max(measured[best], least) / max(ours, least), best
    best = max(measured, key=lambda name: measured[name])
    return ours / measured[best], best
