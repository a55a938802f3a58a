// forward_sm90_d128_scores.cu: the Hopper forward kernel with a scores output, for head sizes up to 128.
#include "forward_sm90_launch.cuh"

namespace onnx_attn::forward_sm90_kernel {

// 225 KB of shared memory, 32 of them for scores, with two places for Q.
using Shape = TileShape<128, 128, 128, 2, false, false, true>;

template <class Element, int kSize>
cudaError_t launch_with_scores(const ForwardParams& params, const LaunchSite& site) {
  return launch_with_scores_by_work<Element, Shape, Shape>(params, site);
}

template cudaError_t launch_with_scores<__half, 128>(const ForwardParams&, const LaunchSite&);
template cudaError_t launch_with_scores<__nv_bfloat16, 128>(const ForwardParams&, const LaunchSite&);

}  // namespace onnx_attn::forward_sm90_kernel
