// forward_sm80.cu: entry of the portable tensor-core forward kernel: what the kernel is told, and which head size runs.
#include <algorithm>

#include "../device/base_2.cuh"
#include "../launch.h"
#include "forward_sm80_params.h"
#include "plan_mask_tile.h"

namespace onnx_attn {

namespace forward_sm80_kernel {

namespace {

ForwardParams make_params(const Problem& problem) {
  ForwardParams params;
  params.problem = problem;
  // In raw scores a wide bias may be out of range, and with a unit of 1 the rows that it lowers to -1e9 are no slower than others.
  const TensorMask& tensor = problem.mask.tensor;
  const bool has_wide_bias =
      problem.mask.padding.kind != Padding::Kind::none || (tensor.kind == TensorMask::Kind::bias && tensor.dtype != DType::f16);
  const float unit = raw_unit(problem);
  float bias_unit = static_cast<float>(kExactLog2e);
  if (problem.softcap != 0) {
    params.transform.form = ScoreForm::capped;
    params.transform.cap = static_cast<float>(problem.softcap * kExactLog2e);
    params.transform.cap_in = static_cast<float>(2 * kExactLog2e * problem.scale / problem.softcap);
  } else if (has_wide_bias || !is_usual_unit(unit)) {
    params.transform.form = ScoreForm::scaled;
    params.transform.scale = unit;
  } else {
    params.unit = unit;
    bias_unit = static_cast<float>(1 / problem.scale);
  }
  params.mask_tile = device::plan_mask_tile(problem, bias_unit);
  return params;
}

struct Launcher {
  int64_t head_size;
  DType dtype;
  cudaError_t (*launch)(const ForwardParams&, cudaStream_t);
};

// Both head sizes are rounded up to the first that is large enough. Sorted by size.
constexpr Launcher kLaunchers[] = {
    {64, DType::f16, launch<__half, 64>},   {64, DType::bf16, launch<__nv_bfloat16, 64>},
    {96, DType::f16, launch<__half, 96>},   {96, DType::bf16, launch<__nv_bfloat16, 96>},
    {128, DType::f16, launch<__half, 128>}, {128, DType::bf16, launch<__nv_bfloat16, 128>},
    {192, DType::f16, launch<__half, 192>}, {192, DType::bf16, launch<__nv_bfloat16, 192>},
    {256, DType::f16, launch<__half, 256>}, {256, DType::bf16, launch<__nv_bfloat16, 256>},
};

}  // namespace

}  // namespace forward_sm80_kernel

namespace cuda {

int forward_sm80(const Problem& problem, const Plan&, void* stream) {
  using namespace forward_sm80_kernel;
  for (const Launcher& launcher : kLaunchers) {
    if (launcher.dtype == problem.dtype && launcher.head_size >= std::max(problem.head_size, problem.v_head_size)) {
      return launcher.launch(make_params(problem), static_cast<cudaStream_t>(stream));
    }
  }
  return cudaErrorInvalidValue;  // forward_sm80_refusal was not asked
}

}  // namespace cuda

}  // namespace onnx_attn
