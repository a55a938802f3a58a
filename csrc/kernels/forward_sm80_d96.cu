// forward_sm80_d96.cu: the portable forward kernel for head sizes up to 96.
#include "forward_sm80_launch.cuh"

namespace onnx_attn::forward_sm80_kernel {

// TFLOP/s at 8,16,2048 on an H200 (2026-11-30): 342, also with 96 keys; 295 with one row tile.
using Shape = TileShape<96, 2, 64, false>;

template <class Element, int kHeadSize>
cudaError_t launch(const ForwardParams& params, cudaStream_t stream) {
  return launch_either<Element, Shape, Shape>(params, stream);
}

template cudaError_t launch<__half, 96>(const ForwardParams&, cudaStream_t);
template cudaError_t launch<__nv_bfloat16, 96>(const ForwardParams&, cudaStream_t);

}  // namespace onnx_attn::forward_sm80_kernel
