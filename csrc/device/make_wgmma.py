"""Writes wgmma.cuh: one wrapper for each shape of Hopper's warpgroup product. Run it here after changing SHAPES."""

from pathlib import Path

KEY_TILES = (64, 80, 112, 128)  # columns of Q K^T: keys of a tile
VALUE_SIZES = (64, 96, 128, 192, 256)  # columns of P V: the value head sizes that are compiled

HEADER = """\
// wgmma.cuh: Hopper's warpgroup products, 64 rows by N columns by a depth of 16. Written by make_wgmma.py; do not edit.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace onnx_attn::device {

#define ONNX_ATTN_TILES_1(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define ONNX_ATTN_TILES_2(j) ONNX_ATTN_TILES_1(j), ONNX_ATTN_TILES_1(j + 1)
#define ONNX_ATTN_TILES_4(j) ONNX_ATTN_TILES_2(j), ONNX_ATTN_TILES_2(j + 2)
#define ONNX_ATTN_TILES_8(j) ONNX_ATTN_TILES_4(j), ONNX_ATTN_TILES_4(j + 4)
#define ONNX_ATTN_TILES_16(j) ONNX_ATTN_TILES_8(j), ONNX_ATTN_TILES_8(j + 8)
"""

FOOTER = """
#undef ONNX_ATTN_TILES_1
#undef ONNX_ATTN_TILES_2
#undef ONNX_ATTN_TILES_4
#undef ONNX_ATTN_TILES_8
#undef ONNX_ATTN_TILES_16

}  // namespace onnx_attn::device
"""


def wrapped(words: list[str], indent: str, ends: tuple[str, str] = ("", "")) -> str:
    lines, line = [], ""
    for word in words:
        if len(indent) + len(line) + len(word) > 130:
            lines.append(line)
            line = ""
        line += word
    return "\n".join(f"{indent}{ends[0]}{text}{ends[1]}" for text in [*lines, line])


def accumulators(columns: int) -> str:
    parts, tile = [], 0
    while tile < columns // 8:
        size = next(size for size in (16, 8, 4, 2, 1) if tile + size <= columns // 8)
        parts.append(f"ONNX_ATTN_TILES_{size}({tile})")
        tile += size
    return ", ".join(parts)


def wrapper(columns: int, left_in_registers: bool) -> str:
    registers = columns // 2
    names = [f"%{i}, " for i in range(registers - 1)] + [f"%{registers - 1}"]
    if left_in_registers:  # the right operand is V: its rows run along the depth, hence transposed (the last 1)
        comment = f"// d = a * b, or d += a * b to go on; a (P) in registers and b (V) in shared memory, {columns} columns."
        name, left, go_on = "multiply_values", "const uint32_t (&a)[4]", registers + 5
        operands = f"{{%{registers}, %{registers + 1}, %{registers + 2}, %{registers + 3}}}, %{registers + 4}, p, 1, 1, 1;"
        inputs = '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)'
    else:
        comment = f"// d = a * b, or d += a * b to go on; a (Q) and b (K) in shared memory, {columns} columns."
        name, left, go_on = "multiply_keys", "uint64_t a", registers + 2
        operands = f"%{registers}, %{registers + 1}, p, 1, 1, 0, 0;"
        inputs = '"l"(a), "l"(b)'
    text = f"\n{comment}\ntemplate <class Element>\n"
    text += f"__device__ __forceinline__ void {name}(float (&d)[{columns // 8}][4], {left}, uint64_t b, bool go_on) {{\n"
    for is_half, type_name in ((True, "f16"), (False, "bf16")):
        text += "  if constexpr (std::is_same_v<Element, __half>)\n" if is_half else "  else\n"
        text += "    asm volatile(\n"
        product = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{type_name}.{type_name}"
        text += f'        "{{ .reg .pred p; setp.ne.b32 p, %{go_on}, 0; {product} {{"\n'
        text += wrapped(names, "        ", ('"', '"')) + "\n"
        text += f'        "}}, {operands} }}"\n'
        text += f'        : {accumulators(columns)}\n        : {inputs}, "r"(static_cast<int>(go_on)));\n'
    return text + "}\n"


def main() -> None:
    text = HEADER
    for columns in KEY_TILES:
        text += wrapper(columns, left_in_registers=False)
    for columns in VALUE_SIZES:
        text += wrapper(columns, left_in_registers=True)
    Path(__file__).with_name("wgmma.cuh").write_text(text + FOOTER)


if __name__ == "__main__":
    main()
