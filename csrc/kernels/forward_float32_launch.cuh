// forward_float32_launch.cuh: how a shape of the float32 forward kernel is launched.
#pragma once

#include "forward_float32.cuh"
#include "launch_row_blocks.cuh"

namespace onnx_attn::forward_float32_kernel {

template <class Shape, bool kMayHaveExtras = true>
cudaError_t launch_shape(const ForwardParams& params, cudaStream_t stream) {
  constexpr int kMostBytes = Shape::kHeadSize > 128 ? kLargeHeadBytes : kLeastSharedMemory;
  return launch_row_blocks<forward<Shape, kMayHaveExtras>, SharedMemory<Shape>, Shape, kMayHaveExtras, kMostBytes>(params, stream);
}

}  // namespace onnx_attn::forward_float32_kernel
