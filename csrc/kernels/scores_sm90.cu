// scores_sm90.cu: scores on Hopper once Y is there: score_pass_sm90.cuh where it can, else the scores kernel with Hopper's products. Their
// operands come straight from shared memory, whose bandwidth is what bounds the portable one.
#define ONNX_ATTN_WARPGROUPS
#include "forward_sm90_params.h"
#include "scores_launch.cuh"

namespace onnx_attn::cuda {

int scores_sm90(const Problem& problem, const Device& device, void* workspace, void* stream) {
  using namespace forward_sm90_kernel;
  if (score_pass_refusal(problem)) return scores_kernel::run<true>(problem, device, workspace, static_cast<cudaStream_t>(stream));
  LaunchSite site;
  site.sm_count = device.sm_count;
  site.stream = static_cast<cudaStream_t>(stream);
  return launch_any_score_pass(problem, site);
}

}  // namespace onnx_attn::cuda
