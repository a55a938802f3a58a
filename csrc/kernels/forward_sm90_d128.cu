// forward_sm90_d128.cu: the Hopper forward kernel for head sizes up to 128.
#include "forward_sm90_launch.cuh"

namespace onnx_attn::forward_sm90_kernel {

// 128 keys: 225 KB of shared memory with three places for Q. 176 keys, which leave room for one, are slower throughout. With masks,
// registers for everything that can happen to scores bound the keys.
using PlainShape = TileShape<128, 128, 128, 2, false>;
using KeepShape = TileShape<128, 128, 128, 2, false, true>;
using BiasShape = TileShape<128, 128, 128, 2, false, true>;
using MaskShape = TileShape<128, 128, 64, 2, false, true>;

template <class Element, int kHeadSize, int kValueSize>
cudaError_t launch(const ForwardParams& params, const LaunchSite& site) {
  return launch_by_work<Element, PlainShape, PlainShape, KeepShape, BiasShape, MaskShape>(params, site);
}

template cudaError_t launch<__half, 128, 128>(const ForwardParams&, const LaunchSite&);
template cudaError_t launch<__nv_bfloat16, 128, 128>(const ForwardParams&, const LaunchSite&);

}  // namespace onnx_attn::forward_sm90_kernel
