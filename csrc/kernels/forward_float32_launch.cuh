// forward_float32_launch.cuh: grid and shared memory of the float32 forward kernel.
#pragma once

#include "forward_float32.cuh"
#include "shared_memory_limit.h"

namespace onnx_attn::forward_float32_kernel {

template <class Shape, bool kMayHaveExtras = true>
cudaError_t launch_shape(ForwardParams params, cudaStream_t stream) {
  using Tile = MaskTile<Shape::kRows, Shape::kKeys>;
  params.order = device::order_work(params.problem, Shape::kRows);
  const int64_t blocks = params.order.heads * params.order.row_blocks;
  if (blocks == 0) return cudaSuccess;

  constexpr MaskTilePlan kLargestMask{kMayHaveExtras ? MaskTileFormat::f32 : MaskTileFormat::none};
  constexpr int kBytes = sizeof(SharedMemory<Shape>), kMaxBytes = kBytes + Tile::bytes(kLargestMask);
  static_assert(kMaxBytes <= (Shape::kHeadSize > 128 ? kLargeHeadBytes : 99 * 1024), "forward_float32_refusal knows the limits");
  const cudaError_t error = allow_shared_memory<forward<Shape, kMayHaveExtras>>(kMaxBytes);
  if (error != cudaSuccess) return error;
  forward<Shape, kMayHaveExtras>
      <<<static_cast<unsigned>(blocks), Shape::kThreads, kBytes + Tile::bytes(params.mask_tile), stream>>>(params);
  return cudaGetLastError();
}

}  // namespace onnx_attn::forward_float32_kernel
