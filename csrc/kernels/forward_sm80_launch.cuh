// forward_sm80_launch.cuh: grid, shared memory and the choice between the plain kernel and the one with a mask tile.
#pragma once

#include "forward_sm80.cuh"
#include "shared_memory_limit.h"

namespace onnx_attn::forward_sm80_kernel {

template <class Element, class Shape, bool kMaskTile>
cudaError_t launch_shape(ForwardParams params, cudaStream_t stream) {
  using Tile = MaskTile<Shape::kRows, Shape::kKeys>;
  params.order = device::order_work(params.problem, Shape::kRows);
  const int64_t blocks = params.order.heads * params.order.row_blocks;
  if (blocks == 0) return cudaSuccess;

  constexpr MaskTilePlan kLargestMask{kMaskTile ? MaskTileFormat::f32 : MaskTileFormat::none};
  constexpr int kBytes = sizeof(SharedMemory<Element, Shape>), kMaxBytes = kBytes + Tile::bytes(kLargestMask);
  static_assert(kMaxBytes <= 99 * 1024, "what a block may have on compute capability 8.6, 8.9 and 12.0");
  const cudaError_t error = allow_shared_memory<forward<Element, Shape, kMaskTile>>(kMaxBytes);
  if (error != cudaSuccess) return error;
  const int bytes = kBytes + Tile::bytes(params.mask_tile);
  forward<Element, Shape, kMaskTile><<<static_cast<unsigned>(blocks), Shape::kThreads, bytes, stream>>>(params);
  return cudaGetLastError();
}

template <class Element, class PlainShape, class MaskShape>
cudaError_t launch_either(const ForwardParams& params, cudaStream_t stream) {
  if (params.mask_tile.is_empty()) return launch_shape<Element, PlainShape, false>(params, stream);
  return launch_shape<Element, MaskShape, true>(params, stream);
}

}  // namespace onnx_attn::forward_sm80_kernel
