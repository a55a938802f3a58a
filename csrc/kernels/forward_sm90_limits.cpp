// forward_sm90_limits.cpp: which problems the Hopper forward kernel can run, and why not the others.
#include <cmath>
#include <cstdint>

#include "../launch.h"
#include "forward_sm90_limits.h"

namespace onnx_attn::cuda {

namespace {

constexpr int64_t kMaxHeadSize = 256;
constexpr int64_t kMinQueries = 64;               // a product has 64 rows
constexpr int64_t kMaxLength = int64_t{1} << 29;  // positions are 32-bit in the kernel
constexpr int64_t kMaxBlocks = INT32_MAX / 2;

// Bulk copies want 16-byte multiples, and strides that lead somewhere. The stride of an axis with one entry is never used.
bool fits_tensor_map(const Tensor4& tensor, int64_t batch, int64_t heads, int64_t rows) {
  const auto fits = [](int64_t extent, int64_t stride) {
    return extent <= 1 || (stride > 0 && stride % 8 == 0 && stride < (int64_t{1} << 39));
  };
  return reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0 && fits(batch, tensor.batch_stride) && fits(heads, tensor.head_stride) &&
         fits(rows, tensor.row_stride);
}

const char* mask_refusal(const Problem& problem) {
  const TensorMask& mask = problem.mask.tensor;
  if (mask.kind != TensorMask::Kind::none && mask.columns < 1) return "the mask has no column";
  if (mask.kind == TensorMask::Kind::bias && mask.dtype != problem.dtype && mask.dtype != DType::f32) {
    return "the bias has neither Q's type nor float32";
  }
  const Padding& padding = problem.mask.padding;
  if (padding.kind == Padding::Kind::keep && padding.query_stride != 0) return "the key padding mask has a query axis";
  return nullptr;
}

}  // namespace

const char* forward_sm90_refusal(const Problem& problem) {
  if (problem.dtype != DType::f16 && problem.dtype != DType::bf16) return "Q is neither float16 nor bfloat16";
  if (problem.v_dtype != problem.dtype) return "V has another type than Q";
  if (problem.compute != DType::f32) return "softmax in float64 was asked for";
  if (problem.score_mode != ScoreMode::none) return "a scores output was asked for";
  if (problem.beams.index) return "the cache is read through a beam index";
  if (problem.append.active) return "new rows have not been appended yet";
  if (problem.q_bias || problem.k_bias || problem.v_bias) return "there are projection biases";
  if (problem.head_size < 8 || problem.head_size > kMaxHeadSize) return "head_size is not between 8 and 256";
  if (problem.v_head_size < 8 || problem.v_head_size > kMaxHeadSize) return "v_head_size is not between 8 and 256";
  if (problem.head_size % 8 != 0 || problem.v_head_size % 8 != 0) return "a head size is not a multiple of 8";
  if (problem.q_len < kMinQueries) return "there are fewer than 64 queries";
  if (problem.kv_len < 1) return "there are no keys";
  if (problem.q_len > kMaxLength || problem.kv_len > kMaxLength) return "a sequence is longer than 2^29";
  if (problem.batch * problem.q_heads > kMaxBlocks / ((problem.q_len + kMinQueries - 1) / kMinQueries)) {
    return "there are more than 2^30 blocks of query rows";
  }
  if (!fits_tensor_map(problem.q, problem.batch, problem.q_heads, problem.q_len)) return "rows of Q are not 16-byte aligned";
  if (!fits_tensor_map(problem.y, problem.batch, problem.q_heads, problem.q_len)) return "rows of Y are not 16-byte aligned";
  if (!fits_tensor_map(problem.k, problem.batch, problem.kv_heads, problem.kv_len)) return "rows of K are not 16-byte aligned";
  if (!fits_tensor_map(problem.v, problem.batch, problem.kv_heads, problem.kv_len)) return "rows of V are not 16-byte aligned";
  return mask_refusal(problem);
}

// Of the counter from which thread blocks draw their work.
int64_t forward_sm90_workspace_bytes(const Problem& problem, const Device& device) {
  return forward_sm90_kernel::draws_blocks(problem, device.sm_count) ? sizeof(int) : 0;
}

}  // namespace onnx_attn::cuda
