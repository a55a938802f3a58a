// kernel_limits.h: what the refusals of several kernels ask alike. Pure, and there without CUDA too.
#pragma once

#include <cstdint>

#include "../problem.h"

namespace onnx_attn {

inline constexpr int64_t kMaxLength = int64_t{1} << 29;  // positions are 32-bit in the kernels
inline constexpr int64_t kMaxBlocks = INT32_MAX;         // of a launch
inline constexpr int kHopperSharedBytes = 227 * 1024;    // of one block on compute capability 9.0

// Rows of 16-bit elements start at multiples of `bytes`. The stride of an axis with one entry is never used.
inline bool has_aligned_rows(const Tensor4& tensor, int64_t batch, int64_t heads, int64_t rows, int bytes = 16) {
  const auto aligned = [&](int64_t extent, int64_t stride) { return extent <= 1 || stride % (bytes / 2) == 0; };
  return reinterpret_cast<uintptr_t>(tensor.data) % bytes == 0 && aligned(batch, tensor.batch_stride) &&
         aligned(heads, tensor.head_stride) && aligned(rows, tensor.row_stride);
}

inline bool is_half(DType dtype) { return dtype == DType::f16 || dtype == DType::bf16; }
inline constexpr const char* kNotHalf = "Q is neither float16 nor bfloat16";

// What no forward kernel does, ...
inline const char* attention_refusal(const Problem& problem) {
  if (problem.compute != DType::f32) return "softmax in float64 was asked for";
  if (problem.beams.index) return "the cache is read through a beam index";
  if (problem.q_len > kMaxLength || problem.kv_len > kMaxLength) return "a sequence is longer than 2^29";
  return nullptr;
}

// ... none but forward_sm90, ...
inline const char* forward_refusal(const Problem& problem) {
  if (problem.score_mode != ScoreMode::none) return "a scores output was asked for";
  return attention_refusal(problem);
}

// ... and none for 16-bit types.
inline const char* half_refusal(const Problem& problem) {
  if (!is_half(problem.dtype)) return kNotHalf;
  if (problem.v_dtype != problem.dtype) return "V has another type than Q";
  return nullptr;
}
inline const char* half_forward_refusal(const Problem& problem) {
  const char* reason = half_refusal(problem);
  return reason ? reason : forward_refusal(problem);
}

// Of kernels that want K and V as they are.
inline const char* unfinished_refusal(const Problem& problem) {
  if (problem.append.active) return "new rows have not been appended yet";
  if (problem.q_bias || problem.k_bias || problem.v_bias) return "there are projection biases";
  return nullptr;
}

}  // namespace onnx_attn
