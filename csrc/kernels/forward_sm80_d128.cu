// forward_sm80_d128.cu: the portable forward kernel for head sizes up to 128.
#include "forward_sm80_launch.cuh"

namespace onnx_attn::forward_sm80_kernel {

// TFLOP/s at 2,16,8192 on an H200 (2026-11-30): 412; 354 with 32 keys, 370 with 48, 328 with one row tile and three blocks.
using Shape = TileShape<128, 2, 64, false>;

template <class Element, int kHeadSize>
cudaError_t launch(const ForwardParams& params, cudaStream_t stream) {
  return launch_either<Element, Shape, Shape>(params, stream);
}

template cudaError_t launch<__half, 128>(const ForwardParams&, cudaStream_t);
template cudaError_t launch<__nv_bfloat16, 128>(const ForwardParams&, cudaStream_t);

}  // namespace onnx_attn::forward_sm80_kernel
