// forward_sm90_d96.cu: the Hopper forward kernel for head sizes up to 96.
#include "forward_sm90_launch.cuh"

namespace onnx_attn::forward_sm90_kernel {

// With masks, registers for everything that can happen to scores bound the keys.
using PlainShape = TileShape<96, 96, 128, 2, false>;
using KeepShape = TileShape<96, 96, 128, 2, false, true>;
using BiasShape = TileShape<96, 96, 128, 2, false, true>;
using MaskShape = TileShape<96, 96, 64, 2, false, true>;

template <class Element, int kHeadSize, int kValueSize>
cudaError_t launch(const ForwardParams& params, const LaunchSite& site) {
  return launch_by_work<Element, PlainShape, PlainShape, KeepShape, BiasShape, MaskShape>(params, site);
}

template cudaError_t launch<__half, 96, 96>(const ForwardParams&, const LaunchSite&);
template cudaError_t launch<__nv_bfloat16, 96, 96>(const ForwardParams&, const LaunchSite&);

}  // namespace onnx_attn::forward_sm90_kernel
