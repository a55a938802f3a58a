// forward_sm80_launch.cuh: the choice between the plain kernel and the one with a mask tile.
#pragma once

#include "forward_sm80.cuh"
#include "launch_row_blocks.cuh"

namespace onnx_attn::forward_sm80_kernel {

template <class Element, class Shape, bool kMaskTile>
cudaError_t launch_shape(const ForwardParams& params, cudaStream_t stream) {
  return launch_row_blocks<forward<Element, Shape, kMaskTile>, SharedMemory<Element, Shape>, Shape, kMaskTile, kLeastSharedMemory>(params,
                                                                                                                                   stream);
}

template <class Element, class PlainShape, class MaskShape>
cudaError_t launch_either(const ForwardParams& params, cudaStream_t stream) {
  if (params.mask_tile.is_empty()) return launch_shape<Element, PlainShape, false>(params, stream);
  return launch_shape<Element, MaskShape, true>(params, stream);
}

}  // namespace onnx_attn::forward_sm80_kernel
