// forward_sm90_d256.cu: the Hopper forward kernel for head sizes up to 256.
#include "forward_sm90_launch.cuh"

namespace onnx_attn::forward_sm90_kernel {

// 80 keys: 224 KB of shared memory. With masks, that of mask tiles bounds the keys.
using PlainShape = TileShape<256, 256, 80, 2, true>;
using MaskShape = TileShape<256, 256, 64, 2, false, true>;

template <class Element, int kHeadSize, int kValueSize>
cudaError_t launch(const ForwardParams& params, const LaunchSite& site) {
  return launch_by_work<Element, PlainShape, PlainShape, MaskShape, MaskShape, MaskShape>(params, site);
}

template cudaError_t launch<__half, 256, 256>(const ForwardParams&, const LaunchSite&);
template cudaError_t launch<__nv_bfloat16, 256, 256>(const ForwardParams&, const LaunchSite&);

}  // namespace onnx_attn::forward_sm90_kernel
