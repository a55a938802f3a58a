// forward_sm80_launch.cuh: grid, shared memory and the choice between the plain kernel and the one with a mask tile.
#pragma once

#include <algorithm>
#include <atomic>

#include "forward_sm80.cuh"

namespace onnx_attn::forward_sm80_kernel {

// Heads of a band, so that its keys and values take no more than half the L2 of an H200; an A100's holds them too.
inline int64_t heads_of_band(const Problem& problem) {
  constexpr int64_t kBandBytes = int64_t{24} << 20;
  const int64_t kv_head_bytes = problem.kv_len * (problem.head_size + problem.v_head_size) * 2;
  const int64_t group = problem.q_heads / problem.kv_heads;
  return group * (kv_head_bytes > 0 && kv_head_bytes < kBandBytes ? kBandBytes / kv_head_bytes : 1);
}

template <class Element, class Shape, bool kMaskTile>
cudaError_t launch_shape(ForwardParams params, cudaStream_t stream) {
  using Tile = MaskTile<Shape::kRows, Shape::kKeys>;
  const Problem& problem = params.problem;
  params.order.heads = problem.batch * problem.q_heads;
  params.order.row_blocks = (problem.q_len + Shape::kRows - 1) / Shape::kRows;
  params.order.band = std::min(params.order.heads, heads_of_band(problem));
  const int64_t blocks = params.order.heads * params.order.row_blocks;
  if (blocks == 0) return cudaSuccess;

  const auto kernel = forward<Element, Shape, kMaskTile>;
  constexpr MaskTilePlan kLargestMask{kMaskTile ? MaskTileFormat::f32 : MaskTileFormat::none};
  constexpr int kBytes = sizeof(SharedMemory<Element, Shape>), kMaxBytes = kBytes + Tile::bytes(kLargestMask);
  static_assert(kMaxBytes <= 99 * 1024, "what a block may have on compute capability 8.6, 8.9 and 12.0");
  static std::atomic<uint64_t> prepared{0};  // a bit for each of the first 64 devices
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (!(prepared.load(std::memory_order_relaxed) & bit)) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxBytes);
    if (error != cudaSuccess) return error;
    prepared.fetch_or(bit, std::memory_order_relaxed);
  }
  kernel<<<static_cast<unsigned>(blocks), Shape::kThreads, kBytes + Tile::bytes(params.mask_tile), stream>>>(params);
  return cudaGetLastError();
}

template <class Element, class PlainShape, class MaskShape>
cudaError_t launch_either(const ForwardParams& params, cudaStream_t stream) {
  const bool has_mask_tile = params.mask_tile.format != MaskTileFormat::none || params.mask_tile.key_padding;
  return has_mask_tile ? launch_shape<Element, MaskShape, true>(params, stream) : launch_shape<Element, PlainShape, false>(params, stream);
}

}  // namespace onnx_attn::forward_sm80_kernel
