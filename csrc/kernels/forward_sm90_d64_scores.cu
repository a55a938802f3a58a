// forward_sm90_d64_scores.cu: the Hopper forward kernel with a scores output, for head sizes up to 64.
#include "forward_sm90_launch.cuh"

namespace onnx_attn::forward_sm90_kernel {

// Three warpgroups where 192 rows are not mostly padding, as without scores.
using LargeShape = TileShape<64, 64, 128, 3, false, false, true>;
using PlainShape = TileShape<64, 64, 128, 2, false, false, true>;

template <class Element, int kSize>
cudaError_t launch_with_scores(const ForwardParams& params, const LaunchSite& site) {
  return launch_with_scores_by_work<Element, LargeShape, PlainShape>(params, site);
}

template cudaError_t launch_with_scores<__half, 64>(const ForwardParams&, const LaunchSite&);
template cudaError_t launch_with_scores<__nv_bfloat16, 64>(const ForwardParams&, const LaunchSite&);

}  // namespace onnx_attn::forward_sm90_kernel
