// score_pass_sm90.cu: the second pass for scores on Hopper, by head size and by what happens to scores.
#include "score_pass_sm90.cuh"

#include <algorithm>

#include "shared_memory_limit.h"

namespace onnx_attn::forward_sm90_kernel {

namespace {

template <class Element, class Shape, ScoreWork kScoreWork, bool kIsWeights>
cudaError_t launch_pass(ForwardParams params, const LaunchSite& site) {
  static_assert(sizeof(ScorePassMemory<Shape>) <= kHopperSharedBytes);
  params.order = order_work(params.problem, Shape::kRows);
  params.order.band = params.order.group;  // those that run at a time share their keys
  params.blocks = static_cast<int>(params.order.heads * params.order.row_blocks);
  if (!make_product_maps(params, TileSize{Shape::kRows, Shape::kKeys}) || !make_score_map(params)) return cudaErrorInvalidValue;
  constexpr auto kKernel = score_pass<Element, Shape, kScoreWork, kIsWeights>;
  constexpr int kBytes = sizeof(ScorePassMemory<Shape>);
  const cudaError_t error = allow_shared_memory<kKernel>(kBytes);
  if (error != cudaSuccess) return error;
  kKernel<<<std::min(params.blocks, site.sm_count), Shape::kThreads, kBytes, site.stream>>>(params);
  return cudaGetLastError();
}

}  // namespace

template <class Element, int kHeadSize>
cudaError_t launch_score_pass(const ForwardParams& params, const LaunchSite& site) {
  using Shape = ScorePassShape<kHeadSize>;
  const bool is_capped = params.transform.form == ScoreForm::capped;
  if (params.problem.score_mode == ScoreMode::weights) {
    return is_capped ? launch_pass<Element, Shape, ScoreWork::cap, true>(params, site)
                     : launch_pass<Element, Shape, ScoreWork::none, true>(params, site);
  }
  return is_capped ? launch_pass<Element, Shape, ScoreWork::cap, false>(params, site)
                   : launch_pass<Element, Shape, ScoreWork::none, false>(params, site);
}

template cudaError_t launch_score_pass<__half, 64>(const ForwardParams&, const LaunchSite&);
template cudaError_t launch_score_pass<__half, 128>(const ForwardParams&, const LaunchSite&);
template cudaError_t launch_score_pass<__half, 256>(const ForwardParams&, const LaunchSite&);
template cudaError_t launch_score_pass<__nv_bfloat16, 64>(const ForwardParams&, const LaunchSite&);
template cudaError_t launch_score_pass<__nv_bfloat16, 128>(const ForwardParams&, const LaunchSite&);
template cudaError_t launch_score_pass<__nv_bfloat16, 256>(const ForwardParams&, const LaunchSite&);

}  // namespace onnx_attn::forward_sm90_kernel
