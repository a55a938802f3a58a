// forward_sm90.cu: entry of the Hopper forward kernel: what the kernel is told, and which head size runs.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>

#include "../launch.h"
#include "../raw_unit.h"
#include "forward_sm90_params.h"

namespace onnx_attn::forward_sm90_kernel {

namespace {

decltype(&cuTensorMapEncodeTiled) find_encoder() {  // in the driver, without linking it
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  const bool is_found = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
  return is_found ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function) : nullptr;
}

CUtensorMapDataType element_type(DType dtype) {
  return dtype == DType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

// What a map copies at a time: `rows` rows of `columns` elements.
struct Box {
  CUtensorMapDataType type;
  int element_bytes, columns, rows;
};

bool make_map(CUtensorMap& map, const Box& box, const Tensor4& tensor, int64_t columns, int64_t rows, int64_t heads, int64_t batch) {
  static const auto encode = find_encoder();
  if (!encode) return false;
  const auto bytes = [&](int64_t stride, int64_t extent) { return static_cast<cuuint64_t>(extent > 1 ? stride * box.element_bytes : 16); };
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(heads),
                               static_cast<cuuint64_t>(batch)};
  const cuuint64_t strides[3] = {bytes(tensor.row_stride, rows), bytes(tensor.head_stride, heads), bytes(tensor.batch_stride, batch)};
  const cuuint32_t extents[4] = {static_cast<cuuint32_t>(box.columns), static_cast<cuuint32_t>(box.rows), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const auto swizzle = box.columns * box.element_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  return encode(&map, box.type, 4, tensor.data, sizes, strides, extents, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool make_mask_map(ForwardParams& params, const TileSize& tile) {
  const Problem& problem = params.problem;
  const TensorMask& mask = problem.mask.tensor;
  const MaskLayout layout{tile.rows, tile.keys, params.mask.element_bytes};
  const auto type = layout.element_bytes == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                    : layout.element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                                : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  const Box box{type, layout.element_bytes, layout.panel_keys(), params.mask.is_key_row ? 1 : tile.rows};
  const Tensor4 tensor{const_cast<void*>(mask.data), mask.batch_stride, mask.head_stride, mask.query_stride};
  return make_map(params.maps.mask, box, tensor, mask.columns, params.mask.is_key_row ? 1 : problem.q_len,
                  params.mask.by_head ? problem.q_heads : 1, params.mask.by_batch ? problem.batch : 1);
}

MaskTiles choose_mask_tiles(const Problem& problem) {
  const TensorMask& mask = problem.mask.tensor;
  MaskTiles tiles;
  if (mask.kind == TensorMask::Kind::none) return tiles;
  tiles.element_bytes = mask.kind == TensorMask::Kind::keep ? 1 : mask.dtype == DType::f32 ? 4 : 2;
  tiles.is_key_row = mask.query_stride == 0;
  tiles.by_head = mask.head_stride != 0 && problem.q_heads > 1;
  tiles.by_batch = mask.batch_stride != 0 && problem.batch > 1;
  const auto fits = [&](bool is_used, int64_t stride) {
    return !is_used || (stride > 0 && stride * tiles.element_bytes % 16 == 0 && stride < (int64_t{1} << 37));
  };
  // Rows of keys that lie next to each other are judged by their length, so that bits do not depend on how many there are.
  const bool fits_map = reinterpret_cast<uintptr_t>(mask.data) % 16 == 0 &&
                        (tiles.is_key_row ? mask.columns * tiles.element_bytes % 16 == 0 : fits(true, mask.query_stride)) &&
                        fits(tiles.by_head, mask.head_stride) && fits(tiles.by_batch, mask.batch_stride);
  tiles.access = fits_map ? MaskAccess::tiles : MaskAccess::elements;
  return tiles;
}

void set_cap(ScoreTransform& transform, double cap, double slope) {
  // tanh(x) / x in powers of x^2, of least relative error for |x| <= 0.625
  constexpr double kSmall = 0.625, kTanh[4] = {0.99999709, -0.33309232, 0.13015459, -0.04002951};
  transform.form = ScoreForm::capped;
  transform.cap = static_cast<float>(cap);
  transform.exponent = static_cast<float>(2 * kExactLog2e * slope);
  double power = cap * slope;
  for (int i = 0; i < 4; ++i, power *= slope * slope) transform.odd[i] = static_cast<float>(kTanh[i] * power);
  transform.small = slope == 0 ? 0 : static_cast<float>(kSmall / std::abs(slope));
}

ForwardParams make_params(const Problem& problem) {
  ForwardParams params;
  params.problem = problem;
  const Mask& mask = problem.mask;
  params.mask = choose_mask_tiles(problem);

  ScoreTransform& transform = params.transform;
  transform.unit = static_cast<float>(kExactLog2e);
  if (problem.softcap != 0) {
    set_cap(transform, problem.softcap, problem.scale / problem.softcap);
  } else if (scores_stay_raw(problem)) {
    transform.unit = raw_unit(problem);
    params.score_output.scale = static_cast<float>(problem.scale);
  } else {
    transform.form = ScoreForm::scaled;
    transform.scale = static_cast<float>(problem.scale);
  }
  transform.filter = static_cast<float>(mask.padding.filter);
  // In raw scores a finite filter may be beyond every float; it stops far from there, and further still from every score.
  if (transform.form == ScoreForm::raw && std::isfinite(transform.filter)) {
    transform.filter = static_cast<float>(std::clamp(mask.padding.filter / problem.scale, -1e38, 1e38));
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

constexpr Launcher kScoreLaunchers[] = {
    {64, 64, DType::f16, launch_with_scores<__half, 64>},
    {64, 64, DType::bf16, launch_with_scores<__nv_bfloat16, 64>},
    {128, 128, DType::f16, launch_with_scores<__half, 128>},
    {128, 128, DType::bf16, launch_with_scores<__nv_bfloat16, 128>},
};

constexpr Launcher kScorePassLaunchers[] = {
    {64, 0, DType::f16, launch_score_pass<__half, 64>},   {64, 0, DType::bf16, launch_score_pass<__nv_bfloat16, 64>},
    {128, 0, DType::f16, launch_score_pass<__half, 128>}, {128, 0, DType::bf16, launch_score_pass<__nv_bfloat16, 128>},
    {256, 0, DType::f16, launch_score_pass<__half, 256>}, {256, 0, DType::bf16, launch_score_pass<__nv_bfloat16, 256>},
};

template <int kCount>
cudaError_t launch_first(const Launcher (&launchers)[kCount], const Problem& problem, const LaunchSite& site) {
  for (const Launcher& launcher : launchers) {
    if (launcher.dtype == problem.dtype && launcher.head_size >= problem.head_size && launcher.v_head_size >= problem.v_head_size) {
      return launcher.launch(make_params(problem), site);
    }
  }
  return cudaErrorInvalidValue;  // forward_sm90_refusal was not asked
}

}  // namespace

bool make_product_maps(ForwardParams& params, const TileSize& tile) {
  const Problem& problem = params.problem;
  const auto type = element_type(problem.dtype);
  return make_map(params.maps.q, Box{type, 2, 64, tile.rows}, problem.q, problem.head_size, problem.q_len, problem.q_heads,
                  problem.batch) &&
         make_map(params.maps.k, Box{type, 2, 64, tile.keys}, problem.k, problem.head_size, problem.kv_len, problem.kv_heads,
                  problem.batch);
}

bool make_tensor_maps(ForwardParams& params, const TileSize& tile) {
  const Problem& problem = params.problem;
  const auto type = element_type(problem.dtype);
  const Box rows{type, 2, 64, tile.rows}, keys{type, 2, 64, tile.keys};
  return make_product_maps(params, tile) &&
         make_map(params.maps.v, keys, problem.v, problem.v_head_size, problem.kv_len, problem.kv_heads, problem.batch) &&
         make_map(params.maps.y, rows, problem.y, problem.v_head_size, problem.q_len, problem.q_heads, problem.batch) &&
         (params.mask.access != MaskAccess::tiles || make_mask_map(params, tile));
}

bool make_score_map(ForwardParams& params) {
  const Problem& problem = params.problem;
  const auto type = element_type(problem.dtype);
  const int64_t head = problem.q_len * problem.kv_len;
  const Tensor4 scores{problem.scores, problem.q_heads * head, head, problem.kv_len};
  return make_map(params.score_output.map, Box{type, 2, 64, 16}, scores, problem.kv_len, problem.q_len, problem.q_heads, problem.batch);
}

cudaError_t launch_any(const Problem& problem, const LaunchSite& site) {
  return problem.score_mode == ScoreMode::none ? launch_first(kLaunchers, problem, site) : launch_first(kScoreLaunchers, problem, site);
}

cudaError_t launch_any_score_pass(const Problem& problem, const LaunchSite& site) {
  Problem shown = problem;
  shown.v_head_size = 0;
  if (problem.score_mode == ScoreMode::raw) shown.softcap = 0;
  if (problem.score_mode == ScoreMode::raw || problem.score_mode == ScoreMode::capped) {  // defined at every cell
    shown.mask = Mask{};
  }
  return launch_first(kScorePassLaunchers, shown, site);
}

}  // namespace onnx_attn::forward_sm90_kernel

namespace onnx_attn::cuda {

int forward_sm90(const Problem& problem, const Device& device, void* workspace, void* stream) {
  using namespace forward_sm90_kernel;
  const LaunchSite site{choose_tuning(problem, device.sm_count), device.sm_count, static_cast<int*>(workspace),
                        static_cast<cudaStream_t>(stream)};
  return launch_any(problem, site);
}

}  // namespace onnx_attn::cuda
