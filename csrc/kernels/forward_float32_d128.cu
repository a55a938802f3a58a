// forward_float32_d128.cu: the float32 forward kernel for head sizes up to 128.
#include "forward_float32_launch.cuh"

namespace onnx_attn::forward_float32_kernel {

// TFLOP/s at 4,16,2048 on an H200 (2026-11-30), plain and causal, without the splitting of K and V: 105 and 93; 92 and 83 with 32 keys.
// Beside 64 keys a mask tile would not fit on compute capability 8.6.
template <>
cudaError_t launch<128>(const ForwardParams& params, cudaStream_t stream) {
  const bool has_extras = !params.mask_tile.is_empty() || params.softcap != 0;
  return has_extras ? launch_shape<TileShape<128, 1, 32>>(params, stream) : launch_shape<TileShape<128, 1, 64>, false>(params, stream);
}

}  // namespace onnx_attn::forward_float32_kernel
