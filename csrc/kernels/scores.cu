// scores.cu: the portable scores kernel.
#include "scores_launch.cuh"

namespace onnx_attn::cuda {

int scores(const Problem& problem, const Device& device, void* workspace, void* stream) {
  return scores_kernel::run<false>(problem, device, workspace, static_cast<cudaStream_t>(stream));
}

}  // namespace onnx_attn::cuda
