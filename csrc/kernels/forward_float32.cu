// forward_float32.cu: entry of the float32 forward kernel: K and V are split, then the head size chooses the kernel.
#include <algorithm>

#include "../launch.h"
#include "forward_float32_params.h"
#include "plan_mask_tile.h"

namespace onnx_attn::forward_float32_kernel {

namespace {

ForwardParams make_params(const Problem& problem, void* workspace) {
  const int64_t head_size = std::max(problem.head_size, problem.v_head_size);
  ForwardParams params;
  params.problem = problem;
  params.mask_tile = device::plan_natural_mask_tile(problem);
  params.k = split::split_tensor(problem, head_size, workspace);
  params.v = split::split_tensor(problem, head_size, static_cast<char*>(workspace) + split::split_bytes(problem, head_size));
  params.scale = static_cast<float>(problem.scale);
  params.softcap = static_cast<float>(problem.softcap);
  return params;
}

cudaError_t launch_any(const ForwardParams& params, cudaStream_t stream) {
  switch (params.k.columns) {
    case 64: return launch<64>(params, stream);
    case 128: return launch<128>(params, stream);
    case 256: return launch<256>(params, stream);
    default: return cudaErrorInvalidValue;  // forward_float32_refusal was not asked
  }
}

}  // namespace

}  // namespace onnx_attn::forward_float32_kernel

namespace onnx_attn::cuda {

int forward_float32(const Problem& problem, const Plan&, void* workspace, void* stream) {
  using namespace forward_float32_kernel;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const ForwardParams params = make_params(problem, workspace);
  cudaError_t error = split::split_keys(problem, params.k, cuda_stream);
  if (error == cudaSuccess) error = split::split_values(problem, params.v, cuda_stream);
  return error == cudaSuccess ? launch_any(params, cuda_stream) : error;
}

}  // namespace onnx_attn::cuda
