// forward_float32_d256.cu: the float32 forward kernel for head sizes up to 256.
#include "forward_float32_launch.cuh"

namespace onnx_attn::forward_float32_kernel {

template <>
cudaError_t launch<256>(const ForwardParams& params, cudaStream_t stream) {
  return launch_shape<TileShape<256, 1, 16>>(params, stream);
}

}  // namespace onnx_attn::forward_float32_kernel
