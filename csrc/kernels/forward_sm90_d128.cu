// forward_sm90_d128.cu: the Hopper forward kernel for head sizes up to 128.
#include "forward_sm90_launch.cuh"

namespace onnx_attn::forward_sm90_kernel {

// 176 keys: 208 KB of shared memory, for long rows; 128 leave room for a second Q, and waste less on the diagonal. With masks,
// registers for the words of a tile bound the keys.
using LargeShape = TileShape<128, 128, 176, 2, true>;
using PlainShape = TileShape<128, 128, 128, 2, false>;
using MaskShape = TileShape<128, 128, 96, 2, false>;

template <class Element, int kHeadSize, int kValueSize>
cudaError_t launch(const ForwardParams& params, const LaunchSite& site) {
  return launch_by_work<Element, LargeShape, PlainShape, MaskShape>(params, site);
}

template cudaError_t launch<__half, 128, 128>(const ForwardParams&, const LaunchSite&);
template cudaError_t launch<__nv_bfloat16, 128, 128>(const ForwardParams&, const LaunchSite&);

}  // namespace onnx_attn::forward_sm90_kernel
