// forward_sm90_limits.cpp: which problems the Hopper forward kernel and its pass for scores can run, and why not the others.
#include "forward_sm90_limits.h"

#include <algorithm>

#include "../launch.h"
#include "../raw_unit.h"
#include "kernel_limits.h"

namespace onnx_attn::forward_sm90_kernel {

bool scores_stay_raw(const Problem& problem) {
  return problem.softcap == 0 && problem.mask.tensor.kind != TensorMask::Kind::bias && is_usual_unit(raw_unit(problem));
}

// The choices were measured on an H200 at the shapes named; a chip that is warm from work before is 5 to 10 % slower, so
// differences below that are not acted upon.
Tuning choose_tuning(const Problem& problem, int sm_count) {
  Tuning tuning;
  const int64_t heads = problem.batch * problem.q_heads, group = problem.q_heads / problem.kv_heads;
  const int64_t size = std::max(problem.head_size, problem.v_head_size);
  const bool is_triangle = problem.mask.right >= 0 && 2 * problem.q_len > problem.kv_len;  // rows see very different numbers of keys

  // Blocks of rows that differ in length are evened out by many heads side by side, as long as their keys and values stay in the
  // L2 cache. Where all blocks are alike, those that run at a time should share their keys.
  constexpr int64_t kCacheBytes = int64_t{48} << 20;
  const int64_t head_bytes = problem.kv_len * (problem.head_size + problem.v_head_size) * 2;
  constexpr int64_t kMostHeads = 32;
  int64_t kv_heads = 1;
  while (is_triangle && 2 * kv_heads * head_bytes <= kCacheBytes && kv_heads < kMostHeads) kv_heads *= 2;
  tuning.band = std::min(heads, kv_heads * group);

  // Blocks of rows that read the same part of a mask should run together.
  const TensorMask& mask = problem.mask.tensor;
  if (mask.kind != TensorMask::Kind::none && mask.query_stride != 0 && !is_triangle) {
    tuning.is_batch_first = mask.batch_stride == 0 && mask.head_stride != 0;
    if (tuning.is_batch_first) tuning.band = problem.batch;
  }

  if (size <= 64) {
    const auto padded = [&](int64_t rows) { return (problem.q_len + rows - 1) / rows * rows; };
    tuning.large_tile = 4 * padded(192) <= 5 * padded(128);  // 523 against 445 TFLOP/s at 8,32,2048
  }

  // Drawing hides the loads and stores at the ends of a block: 539 against 390 TFLOP/s at 32,16,512,128. The larger shapes have no
  // room for the next block's Q, and nothing to hide behind. The counter is zeroed by a launch of its own, which small problems feel.
  const bool is_large = size > 192;
  tuning.dealing = is_large ? Dealing::one_each : Dealing::drawn;
  if (tuning.dealing == Dealing::drawn && problem.kv_len <= 256) tuning.dealing = Dealing::in_turn;
  if (heads * ((problem.q_len + 127) / 128) <= sm_count) tuning.dealing = Dealing::one_each;
  return tuning;
}

}  // namespace onnx_attn::forward_sm90_kernel

namespace onnx_attn::cuda {

namespace {

constexpr int64_t kMaxHeadSize = 256;
constexpr int64_t kMinQueries = 64;                 // a product has 64 rows
constexpr int64_t kMostRowBlocks = kMaxBlocks / 2;  // numbers that are dealt go beyond those of blocks

// Bulk copies want 16-byte multiples, and strides that lead somewhere. The stride of an axis with one entry is never used.
bool fits_tensor_map(const Tensor4& tensor, int64_t batch, int64_t heads, int64_t rows) {
  const auto fits = [](int64_t extent, int64_t stride) {
    return extent <= 1 || (stride > 0 && stride % 8 == 0 && stride < (int64_t{1} << 39));
  };
  return reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0 && fits(batch, tensor.batch_stride) && fits(heads, tensor.head_stride) &&
         fits(rows, tensor.row_stride);
}

// What the products of Q and K need.
const char* product_refusal(const Problem& problem) {
  if (problem.head_size < 8 || problem.head_size > kMaxHeadSize) return "head_size is not between 8 and 256";
  if (problem.q_len < kMinQueries) return "there are fewer than 64 queries";
  if (problem.kv_len < 1) return "there are no keys";
  if (problem.batch * problem.q_heads > kMostRowBlocks / ((problem.q_len + kMinQueries - 1) / kMinQueries)) {
    return "there are more than 2^30 blocks of query rows";
  }
  if (!fits_tensor_map(problem.q, problem.batch, problem.q_heads, problem.q_len)) return "rows of Q are not 16-byte aligned";
  if (!fits_tensor_map(problem.k, problem.batch, problem.kv_heads, problem.kv_len)) return "rows of K are not 16-byte aligned";
  return nullptr;
}

// What scores need that leave by bulk copies, and without a mask.
const char* score_rows_refusal(const Problem& problem) {
  const Mask& mask = problem.mask;
  const bool shows_all = problem.score_mode == ScoreMode::raw || problem.score_mode == ScoreMode::capped;
  const bool has_mask = mask.tensor.kind != TensorMask::Kind::none || mask.padding.kind != Padding::Kind::none;
  if (has_mask && !shows_all) return "scores with a mask were asked for";
  if (problem.score_mode == ScoreMode::mha_logits && mask.right >= 0) return "scores of keys after a row's own were asked for";
  if (problem.kv_len % 8 != 0 || reinterpret_cast<uintptr_t>(problem.scores) % 16 != 0) return "rows of scores are not 16-byte aligned";
  Problem shown = problem;
  if (shows_all) shown.mask.tensor.kind = TensorMask::Kind::none;
  const bool is_capped = problem.softcap != 0 && problem.score_mode != ScoreMode::raw;
  if (problem.score_mode == ScoreMode::raw) shown.softcap = 0;
  if (!is_capped && !forward_sm90_kernel::scores_stay_raw(shown)) return "scores of an unusual scale were asked for";
  return nullptr;
}

const char* mask_refusal(const Problem& problem) {
  const TensorMask& mask = problem.mask.tensor;
  if (mask.kind != TensorMask::Kind::none && mask.columns < 1) return "the mask has no column";
  if (mask.kind == TensorMask::Kind::bias && mask.dtype != problem.dtype && mask.dtype != DType::f32) {
    return "the bias has neither Q's type nor float32";
  }
  if (mask.kind != TensorMask::Kind::none && mask.columns > 1 && mask.key_stride != 1)
    return "neighbours in the mask are not neighbours in memory";
  const Padding& padding = problem.mask.padding;
  if (padding.kind == Padding::Kind::keep && padding.query_stride != 0) return "the key padding mask has a query axis";
  if (padding.kind == Padding::Kind::keep && padding.columns > 1 && padding.key_stride != 1) {
    return "neighbours in the key padding mask are not neighbours in memory";
  }
  return nullptr;
}

// The scores that leave while Y is made: those that enter the softmax, of keys that some row sees.
const char* score_output_refusal(const Problem& problem) {
  const Mask& mask = problem.mask;
  const ScoreMode mode = problem.score_mode;
  if (mode == ScoreMode::none) return nullptr;
  if (mode == ScoreMode::weights) return "softmax weights were asked for, and no sum is known before the last key";
  if (mask.tensor.kind != TensorMask::Kind::none || mask.padding.kind != Padding::Kind::none) return "scores with a mask were asked for";
  const bool shows_all = mode == ScoreMode::raw || mode == ScoreMode::capped;
  if (shows_all && (mask.lengths.data || mask.left >= 0 || mask.right >= 0)) return "scores of keys that no row sees were asked for";
  if (mode == ScoreMode::raw && problem.softcap != 0) return "scores before the softcap were asked for";
  if (problem.head_size > 128 || problem.v_head_size > 128) return "scores of a head size above 128 were asked for";
  return score_rows_refusal(problem);
}

}  // namespace

const char* forward_sm90_refusal(const Problem& problem) {
  if (const char* reason = half_refusal(problem)) return reason;
  if (const char* reason = score_output_refusal(problem)) return reason;
  if (const char* reason = attention_refusal(problem)) return reason;
  if (const char* reason = unfinished_refusal(problem)) return reason;
  if (const char* reason = product_refusal(problem)) return reason;
  if (problem.v_head_size < 8 || problem.v_head_size > kMaxHeadSize) return "v_head_size is not between 8 and 256";
  if (problem.head_size % 8 != 0 || problem.v_head_size % 8 != 0) return "a head size is not a multiple of 8";
  if (!fits_tensor_map(problem.y, problem.batch, problem.q_heads, problem.q_len)) return "rows of Y are not 16-byte aligned";
  if (!fits_tensor_map(problem.v, problem.batch, problem.kv_heads, problem.kv_len)) return "rows of V are not 16-byte aligned";
  return mask_refusal(problem);
}

// Of the counter from which thread blocks draw their work.
int64_t forward_sm90_workspace_bytes(const Problem& problem, const Device& device) {
  using namespace forward_sm90_kernel;
  return choose_tuning(problem, device.sm_count).dealing == Dealing::drawn ? sizeof(int) : 0;
}

}  // namespace onnx_attn::cuda

namespace onnx_attn::forward_sm90_kernel {

const char* score_pass_refusal(const Problem& problem) {
  using namespace cuda;
  if (!is_half(problem.dtype)) return kNotHalf;
  if (problem.q_bias) return "Q has a projection bias";
  if (const char* reason = product_refusal(problem)) return reason;
  return score_rows_refusal(problem);
}

}  // namespace onnx_attn::forward_sm90_kernel
