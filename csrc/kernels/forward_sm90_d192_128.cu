// forward_sm90_d192_128.cu: the Hopper forward kernel for head sizes up to 192 with value head sizes up to 128.
#include "forward_sm90_launch.cuh"

namespace onnx_attn::forward_sm90_kernel {

// 128 keys: 208 KB of shared memory. With masks, that of mask tiles bounds the keys.
using PlainShape = TileShape<192, 128, 128, 2, false>;
using MaskShape = TileShape<192, 128, 64, 2, false, true>;

template <class Element, int kHeadSize, int kValueSize>
cudaError_t launch(const ForwardParams& params, const LaunchSite& site) {
  return launch_by_work<Element, PlainShape, PlainShape, MaskShape, MaskShape, MaskShape>(params, site);
}

template cudaError_t launch<__half, 192, 128>(const ForwardParams&, const LaunchSite&);
template cudaError_t launch<__nv_bfloat16, 192, 128>(const ForwardParams&, const LaunchSite&);

}  // namespace onnx_attn::forward_sm90_kernel
