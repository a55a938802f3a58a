// scores_sm90.cu: the scores kernel with Hopper's products. Their operands come straight from shared memory, whose bandwidth is
// what bounds the portable one.
#define ONNX_ATTN_WARPGROUPS
#include "scores_launch.cuh"

namespace onnx_attn::cuda {

int scores_sm90(const Problem& problem, const Device& device, void* workspace, void* stream) {
  return scores_kernel::run<true>(problem, device, workspace, static_cast<cudaStream_t>(stream));
}

}  // namespace onnx_attn::cuda
