// forward_sm90_d64.cu: the Hopper forward kernel for head sizes up to 64.
#include "forward_sm90_launch.cuh"

namespace onnx_attn::forward_sm90_kernel {

// Three warpgroups: exponentials cost as much as products here, and more warps hide them better. Two where 192 rows would be
// mostly padding, and where registers for everything that can happen to scores are short.
using LargeShape = TileShape<64, 64, 128, 3, false>;
using PlainShape = TileShape<64, 64, 128, 2, false>;
using KeepShape = TileShape<64, 64, 128, 3, false, true>;
using BiasShape = TileShape<64, 64, 128, 3, false, true>;
using MaskShape = TileShape<64, 64, 128, 2, false, true>;

template <class Element, int kHeadSize, int kValueSize>
cudaError_t launch(const ForwardParams& params, const LaunchSite& site) {
  return launch_by_work<Element, LargeShape, PlainShape, KeepShape, BiasShape, MaskShape>(params, site);
}

template cudaError_t launch<__half, 64, 64>(const ForwardParams&, const LaunchSite&);
template cudaError_t launch<__nv_bfloat16, 64, 64>(const ForwardParams&, const LaunchSite&);

}  // namespace onnx_attn::forward_sm90_kernel
