// forward_sm80_d128.cu: the portable forward kernel for head sizes up to 128.
#include "forward_sm80_launch.cuh"

namespace onnx_attn::forward_sm80_kernel {

// TODO
using PlainShape = TileShape<128, 2, 64, false>;
using MaskShape = TileShape<128, 2, 64, false>;

template <class Element, int kHeadSize>
cudaError_t launch(const ForwardParams& params, cudaStream_t stream) {
  return launch_either<Element, PlainShape, MaskShape>(params, stream);
}

template cudaError_t launch<__half, 128>(const ForwardParams&, cudaStream_t);
template cudaError_t launch<__nv_bfloat16, 128>(const ForwardParams&, cudaStream_t);

}  // namespace onnx_attn::forward_sm80_kernel
