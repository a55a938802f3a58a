// forward_short_sm90.cu: entry of the forward kernel for short sequences: what the kernel is told, and which instantiation runs.
#include <algorithm>

#include "../launch.h"
#include "../raw_unit.h"
#include "forward_short.cuh"
#include "kernel_limits.h"
#include "shared_memory_limit.h"

namespace onnx_attn::forward_short_kernel {

namespace {

ForwardParams make_params(const Problem& problem, int sm_count) {
  const Mask& mask = problem.mask;
  const auto near = [](int64_t key) { return static_cast<int>(std::clamp<int64_t>(key, -kFar, kFar)); };
  ForwardParams params;
  params.problem = problem;
  params.plan = plan_block(problem, sm_count);
  params.q_heads = Divisor(problem.q_heads);
  params.group = Divisor(problem.q_heads / problem.kv_heads);
  params.scale = static_cast<float>(problem.scale);
  params.raw_unit = raw_unit(problem);
  params.must_scale = !is_usual_unit(params.raw_unit);
  params.columns = near(mask.tensor.kind == TensorMask::Kind::none ? problem.kv_len : mask.tensor.columns);
  const int64_t offset = mask.offset_follows_length ? 0 : mask.offset;
  if (mask.left >= 0) params.begin = near(offset - mask.left);
  if (mask.right >= 0) params.end = near(offset + mask.right + 1);
  return params;
}

template <class Element, int kHeadSize, bool kHasKeyRow>
cudaError_t launch(const ForwardParams& params, cudaStream_t stream) {
  constexpr auto kernel = forward<Element, TileShape<kHeadSize>, kHasKeyRow>;
  const cudaError_t error = allow_shared_memory<kernel>(kHopperSharedBytes);
  if (error != cudaSuccess) return error;
  kernel<<<params.plan.blocks, warpgroups_of(kHeadSize) * kWarpgroupThreads, params.plan.bytes(), stream>>>(params);
  return cudaGetLastError();
}

template <class Element>
cudaError_t launch_by_work(const ForwardParams& params, cudaStream_t stream) {
  const Mask& mask = params.problem.mask;
  const bool has_key_row = mask.tensor.kind != TensorMask::Kind::none || mask.padding.kind != Padding::Kind::none || params.must_scale;
  if (params.plan.layout.head_size == 64) {
    return has_key_row ? launch<Element, 64, true>(params, stream) : launch<Element, 64, false>(params, stream);
  }
  return has_key_row ? launch<Element, 128, true>(params, stream) : launch<Element, 128, false>(params, stream);
}

}  // namespace

}  // namespace onnx_attn::forward_short_kernel

namespace onnx_attn::cuda {

int forward_short(const Problem& problem, const Device& device, void* stream) {
  using namespace forward_short_kernel;
  const ForwardParams params = make_params(problem, device.sm_count);
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  return problem.dtype == DType::f16 ? launch_by_work<__half>(params, on) : launch_by_work<__nv_bfloat16>(params, on);
}

}  // namespace onnx_attn::cuda
