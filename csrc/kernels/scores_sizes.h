// scores_sizes.h: tile sizes of the scores kernel, which its refusals need too. Pure, and there without CUDA.
#pragma once

#include <cstdint>

#include "../problem.h"

namespace onnx_attn::scores_kernel {

inline constexpr int kThreads = 128;
inline constexpr int kKeys = 64;   // of a tile
inline constexpr int kDepth = 64;  // columns of K in shared memory at a time

// float32 numbers are pairs of float16: twice the operands, so half the rows.
inline constexpr int parts(DType dtype) { return dtype == DType::f32 ? 2 : 1; }
inline constexpr int row_tiles(DType dtype) { return dtype == DType::f32 ? 1 : 2; }  // of 16 rows, for each warp
inline constexpr int rows(DType dtype) { return 16 * row_tiles(dtype) * kThreads / 32; }
inline constexpr int stages(DType dtype) { return dtype == DType::f32 ? 2 : 3; }  // of K in flight
// Rows leave by way of shared memory, 16 of each warp at a time, spaced so that writes meet different banks.
inline constexpr int output_pitch(DType dtype) { return kKeys * float_bytes(dtype) + (dtype == DType::f32 ? 32 : 16); }
inline constexpr int output_bytes(DType dtype) { return kThreads / 32 * 16 * output_pitch(dtype); }
inline constexpr int ring_bytes(DType dtype) { return stages(dtype) * parts(dtype) * kKeys * kDepth * 2; }
// Shared memory of a block without the rows of Q and the mask tile.
inline constexpr int fixed_bytes(DType dtype) { return ring_bytes(dtype) + output_bytes(dtype) + 2560; }

inline int64_t depth_chunks(const Problem& problem) { return (problem.head_size + kDepth - 1) / kDepth; }
inline int64_t query_bytes(const Problem& problem) {
  return depth_chunks(problem) * parts(problem.dtype) * rows(problem.dtype) * kDepth * 2;
}
inline int64_t mask_bytes(const Problem& problem) {  // at most
  const Mask& mask = problem.mask;
  const bool is_wide = mask.padding.kind == Padding::Kind::keep || mask.tensor.kind == TensorMask::Kind::bias;
  if (mask.tensor.kind == TensorMask::Kind::none && !is_wide) return 0;
  return rows(problem.dtype) * (kKeys * (is_wide ? 4 : 1) + 16);
}
inline int64_t block_bytes(const Problem& problem) {  // at most
  return fixed_bytes(problem.dtype) + query_bytes(problem) + mask_bytes(problem);
}

}  // namespace onnx_attn::scores_kernel
