// launch_row_blocks.cuh: grid and shared memory of the forward kernels whose thread blocks own rows of one head and stage mask tiles.
#pragma once

#include "../device/masking.cuh"
#include "../device/work.cuh"
#include "shared_memory_limit.h"

namespace onnx_attn {

// kMayHaveMask: the kernel stages mask tiles, behind its SharedMemory. A block may take up to kMostBytes of shared memory.
template <auto kKernel, class SharedMemory, class Shape, bool kMayHaveMask, int kMostBytes, class ForwardParams>
cudaError_t launch_row_blocks(ForwardParams params, cudaStream_t stream) {
  using Tile = device::MaskTile<Shape::kRows, Shape::kKeys>;
  params.order = device::order_work(params.problem, Shape::kRows);
  const int64_t blocks = params.order.heads * params.order.row_blocks;
  if (blocks == 0) return cudaSuccess;

  constexpr device::MaskTilePlan kLargestMask{kMayHaveMask ? device::MaskTileFormat::f32 : device::MaskTileFormat::none};
  constexpr int kBytes = sizeof(SharedMemory), kMaxBytes = kBytes + Tile::bytes(kLargestMask);
  static_assert(kMaxBytes <= kMostBytes, "the kernel's refusals know the limit");
  const cudaError_t error = allow_shared_memory<kKernel>(kMaxBytes);
  if (error != cudaSuccess) return error;
  kKernel<<<static_cast<unsigned>(blocks), Shape::kThreads, kBytes + Tile::bytes(params.mask_tile), stream>>>(params);
  return cudaGetLastError();
}

}  // namespace onnx_attn
