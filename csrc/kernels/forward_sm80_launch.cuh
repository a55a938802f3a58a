// forward_sm80_launch.cuh: grid, shared memory and the choice between the plain kernel and the one with a mask tile.
#pragma once

#include <algorithm>
#include <atomic>

#include "forward_sm80.cuh"

namespace onnx_attn::forward_sm80_kernel {

inline device::WorkOrder order_work(const Problem& problem, int64_t rows_per_block) {
  // With all heads in one band the longest blocks of a causal call start first and no long one is left for the end: 395 TFLOP/s
  // at 2,16,8192,128 on an H200 (2026-11-30), against 340 with bands of 6 heads that stay in L2. Beyond 64 heads fewer than 4 of the blocks
  // that run at a time would share a head's keys.
  constexpr int64_t kBandHeads = 64;
  device::WorkOrder order;
  order.heads = problem.batch * problem.q_heads;
  order.row_blocks = (problem.q_len + rows_per_block - 1) / rows_per_block;
  order.group = problem.q_heads / problem.kv_heads;
  const int64_t kv_heads = problem.batch * problem.kv_heads, bands = std::max(int64_t{1}, (order.heads + kBandHeads - 1) / kBandHeads);
  order.band = (kv_heads + bands - 1) / bands * order.group;  // even bands: a short last one would be a long tail
  return order;
}

template <class Element, class Shape, bool kMaskTile>
cudaError_t launch_shape(ForwardParams params, cudaStream_t stream) {
  using Tile = MaskTile<Shape::kRows, Shape::kKeys>;
  params.order = order_work(params.problem, Shape::kRows);
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
