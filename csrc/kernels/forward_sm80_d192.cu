// forward_sm80_d192.cu: the portable forward kernel for head sizes up to 192.
#include "forward_sm80_launch.cuh"

namespace onnx_attn::forward_sm80_kernel {

// TFLOP/s at 4,16,4096 on an H200 (2026-11-30): 335; 315 with Q read from shared memory, 279 with 32 keys.
using Shape = TileShape<192, 1, 64, true>;

template <class Element, int kHeadSize>
cudaError_t launch(const ForwardParams& params, cudaStream_t stream) {
  return launch_either<Element, Shape, Shape>(params, stream);
}

template cudaError_t launch<__half, 192>(const ForwardParams&, cudaStream_t);
template cudaError_t launch<__nv_bfloat16, 192>(const ForwardParams&, cudaStream_t);

}  // namespace onnx_attn::forward_sm80_kernel
