// forward_sm90.cu: entry of the Hopper forward kernel: what the kernel is told, and which head size runs.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>

#include "../launch.h"
#include "forward_sm90_params.h"

namespace onnx_attn::forward_sm90_kernel {

namespace {

constexpr double kLog2e = 1.4426950408889634;
constexpr float kMinUnit = 1e-6f;
constexpr int64_t kFar = int64_t{1} << 40;  // beyond every key; sums of a few do not overflow

decltype(&cuTensorMapEncodeTiled) find_encoder() {  // in the driver, without linking it
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  const bool is_found = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
  return is_found ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function) : nullptr;
}

bool make_map(CUtensorMap& map, DType dtype, const Tensor4& tensor, int64_t columns, int64_t rows, int64_t heads, int64_t batch,
              int box_rows) {
  static const auto encode = find_encoder();
  if (!encode) return false;
  const auto bytes = [](int64_t stride, int64_t extent) { return static_cast<cuuint64_t>(extent > 1 ? stride * 2 : 16); };
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(heads),
                               static_cast<cuuint64_t>(batch)};
  const cuuint64_t strides[3] = {bytes(tensor.row_stride, rows), bytes(tensor.head_stride, heads), bytes(tensor.batch_stride, batch)};
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(box_rows), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const auto type = dtype == DType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return encode(&map, type, 4, tensor.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Two neighbouring mask elements can be read at once.
bool has_pairs(const TensorMask& mask, const Problem& problem) {
  if (mask.kind == TensorMask::Kind::bias && mask.dtype != problem.dtype) return false;
  const int64_t pair_bytes = mask.kind == TensorMask::Kind::keep ? 2 : 4;
  const auto is_even = [](int64_t extent, int64_t stride) { return extent <= 1 || stride % 2 == 0; };
  return mask.key_stride == 1 && mask.columns % 2 == 0 && reinterpret_cast<uintptr_t>(mask.data) % pair_bytes == 0 &&
         is_even(problem.batch, mask.batch_stride) && is_even(problem.q_heads, mask.head_stride) &&
         is_even(problem.q_len, mask.query_stride);
}

void set_cap(ScoreTransform& transform, double cap, double slope) {
  // tanh(x) / x in powers of x^2, of least relative error for |x| <= 0.625
  constexpr double kSmall = 0.625, kTanh[4] = {0.99999709, -0.33309232, 0.13015459, -0.04002951};
  transform.form = ScoreForm::capped;
  transform.cap = static_cast<float>(cap);
  transform.exponent = static_cast<float>(2 * kLog2e * slope);
  double power = cap * slope;
  for (int i = 0; i < 4; ++i, power *= slope * slope) transform.odd[i] = static_cast<float>(kTanh[i] * power);
  transform.small = slope == 0 ? 0 : static_cast<float>(kSmall / std::abs(slope));
}

ForwardParams make_params(const Problem& problem) {
  ForwardParams params;
  params.problem = problem;
  Mask& mask = params.problem.mask;
  mask.left = std::min(mask.left, kFar);
  mask.right = std::min(mask.right, kFar);
  mask.offset = std::clamp(mask.offset, -kFar, kFar);

  if (mask.tensor.kind != TensorMask::Kind::none)
    params.mask_access = has_pairs(mask.tensor, problem) ? MaskAccess::pairs : MaskAccess::elements;
  const bool has_masks = params.mask_access != MaskAccess::none || mask.padding.kind != Padding::Kind::none;
  const float unit = static_cast<float>(problem.scale * kLog2e);
  ScoreTransform& transform = params.transform;
  if (problem.softcap != 0) {
    set_cap(transform, problem.softcap * kLog2e, problem.scale / problem.softcap);
  } else if (has_masks || !(unit >= kMinUnit && unit <= 1)) {  // 0 included: it would make NaN of excluded scores
    transform.form = ScoreForm::scaled;
    transform.scale = unit;
  } else {
    transform.unit = unit;
  }
  return params;
}

struct Launcher {
  int64_t head_size, v_head_size;
  DType dtype;
  cudaError_t (*launch)(const ForwardParams&, const LaunchSite&);
};

// Head sizes are rounded up to the first pair that is large enough: bulk copies fill up with zeros, and cut off the output.
constexpr Launcher kLaunchers[] = {
    {64, 64, DType::f16, launch<__half, 64, 64>},     {64, 64, DType::bf16, launch<__nv_bfloat16, 64, 64>},
    {96, 96, DType::f16, launch<__half, 96, 96>},     {96, 96, DType::bf16, launch<__nv_bfloat16, 96, 96>},
    {128, 128, DType::f16, launch<__half, 128, 128>}, {128, 128, DType::bf16, launch<__nv_bfloat16, 128, 128>},
    {192, 128, DType::f16, launch<__half, 192, 128>}, {192, 128, DType::bf16, launch<__nv_bfloat16, 192, 128>},
    {192, 192, DType::f16, launch<__half, 192, 192>}, {192, 192, DType::bf16, launch<__nv_bfloat16, 192, 192>},
    {256, 256, DType::f16, launch<__half, 256, 256>}, {256, 256, DType::bf16, launch<__nv_bfloat16, 256, 256>},
};

}  // namespace

bool make_tensor_maps(TensorMaps& maps, const Problem& problem, int block_rows, int tile_keys) {
  const int64_t batch = problem.batch, q_heads = problem.q_heads, kv_heads = problem.kv_heads;
  constexpr int kStoredRows = 64;  // by a warpgroup
  return make_map(maps.q, problem.dtype, problem.q, problem.head_size, problem.q_len, q_heads, batch, block_rows) &&
         make_map(maps.k, problem.dtype, problem.k, problem.head_size, problem.kv_len, kv_heads, batch, tile_keys) &&
         make_map(maps.v, problem.dtype, problem.v, problem.v_head_size, problem.kv_len, kv_heads, batch, tile_keys) &&
         make_map(maps.y, problem.dtype, problem.y, problem.v_head_size, problem.q_len, q_heads, batch, kStoredRows);
}

cudaError_t launch_any(const Problem& problem, const LaunchSite& site) {
  for (const Launcher& launcher : kLaunchers) {
    if (launcher.dtype == problem.dtype && launcher.head_size >= problem.head_size && launcher.v_head_size >= problem.v_head_size) {
      return launcher.launch(make_params(problem), site);
    }
  }
  return cudaErrorInvalidValue;  // forward_sm90_refusal was not asked
}

}  // namespace onnx_attn::forward_sm90_kernel

namespace onnx_attn::cuda {

int forward_sm90(const Problem& problem, const Plan&, void* workspace, void* stream) {
  using namespace forward_sm90_kernel;
  int index = 0;
  Device device;
  int error = cudaGetDevice(&index);
  if (error == cudaSuccess) error = query_device(index, &device);
  if (error != cudaSuccess) return error;
  const LaunchSite site{choose_tuning(problem, device.sm_count), device.sm_count, static_cast<int*>(workspace),
                        static_cast<cudaStream_t>(stream)};
  return launch_any(problem, site);
}

}  // namespace onnx_attn::cuda
