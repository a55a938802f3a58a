// split_sizes.h: room in the workspace for float32 keys or values as float16 pairs. Pure, and there without CUDA too.
#pragma once

#include <cstdint>

#include "../problem.h"

namespace onnx_attn::split {

inline constexpr int64_t kMaxColumns = 256;
inline constexpr int64_t kRowGranule = 64;  // no key tile is longer

// Rounded up, so that kernels meet no ragged ends.
inline int64_t padded_columns(int64_t columns) { return columns <= 64 ? 64 : columns <= 128 ? 128 : kMaxColumns; }
inline int64_t padded_rows(int64_t rows) { return (rows + kRowGranule - 1) / kRowGranule * kRowGranule; }

inline int64_t halves_bytes(const Problem& problem, int64_t columns) {
  return problem.batch * problem.kv_heads * padded_rows(problem.kv_len) * 2 * padded_columns(columns) * 2;
}
inline int64_t split_bytes(const Problem& problem, int64_t columns) {  // a multiple of 256
  return halves_bytes(problem, columns) + problem.batch * problem.kv_heads * padded_rows(problem.kv_len) * 4;
}

}  // namespace onnx_attn::split
