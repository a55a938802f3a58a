// forward_float32_d64.cu: the float32 forward kernel for head sizes up to 64.
#include "forward_float32_launch.cuh"

namespace onnx_attn::forward_float32_kernel {

template <>
cudaError_t launch<64>(const ForwardParams& params, cudaStream_t stream) {
  return launch_shape<TileShape<64, 2, 32>>(params, stream);
}

}  // namespace onnx_attn::forward_float32_kernel
