// forward_sm80_d64.cu: the portable forward kernel for head sizes up to 64.
#include "forward_sm80_launch.cuh"

namespace onnx_attn::forward_sm80_kernel {

// TFLOP/s at 8,32,2048 on an H200 (2026-11-30): 319; 299 with 64 keys, 303 with 96, 311 with one row tile and three blocks.
// Beside 128 keys a mask tile would not fit.
using PlainShape = TileShape<64, 2, 128, false>;
using MaskShape = TileShape<64, 2, 64, false>;

template <class Element, int kHeadSize>
cudaError_t launch(const ForwardParams& params, cudaStream_t stream) {
  return launch_either<Element, PlainShape, MaskShape>(params, stream);
}

template cudaError_t launch<__half, 64>(const ForwardParams&, cudaStream_t);
template cudaError_t launch<__nv_bfloat16, 64>(const ForwardParams&, cudaStream_t);

}  // namespace onnx_attn::forward_sm80_kernel
