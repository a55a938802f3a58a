// forward_sm80_d256.cu: the portable forward kernel for head sizes up to 256.
#include "forward_sm80_launch.cuh"

namespace onnx_attn::forward_sm80_kernel {

// TFLOP/s at 2,8,8192 plain and causal on an H200 (2026-11-30): 310 and 316; 295 and 302 with 32 keys and Q in registers,
// which leaves room for a mask tile.
using PlainShape = TileShape<256, 1, 64, false>;
using MaskShape = TileShape<256, 1, 32, true>;

template <class Element, int kHeadSize>
cudaError_t launch(const ForwardParams& params, cudaStream_t stream) {
  return launch_either<Element, PlainShape, MaskShape>(params, stream);
}

template cudaError_t launch<__half, 256>(const ForwardParams&, cudaStream_t);
template cudaError_t launch<__nv_bfloat16, 256>(const ForwardParams&, cudaStream_t);

}  // namespace onnx_attn::forward_sm80_kernel
