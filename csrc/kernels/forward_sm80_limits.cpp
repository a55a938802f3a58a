// forward_sm80_limits.cpp: which problems the portable tensor-core forward kernel can run, and why not the others.
#include <cstdint>

#include "../launch.h"
#include "aligned_rows.h"

namespace onnx_attn::cuda {

namespace {

constexpr int64_t kMaxHeadSize = 256;
constexpr int64_t kMaxLength = int64_t{1} << 29;  // positions are 32-bit in the kernel
constexpr int64_t kMinBlockRows = 64;
constexpr int64_t kMaxBlocks = INT32_MAX;

}  // namespace

const char* forward_sm80_refusal(const Problem& problem) {
  if (problem.dtype != DType::f16 && problem.dtype != DType::bf16) return "Q is neither float16 nor bfloat16";
  if (problem.v_dtype != problem.dtype) return "V has another type than Q";
  if (problem.compute != DType::f32) return "softmax in float64 was asked for";
  if (problem.score_mode != ScoreMode::none) return "a scores output was asked for";
  if (problem.beams.index) return "the cache is read through a beam index";
  if (problem.head_size < 1 || problem.head_size > kMaxHeadSize) return "head_size is not between 1 and 256";
  if (problem.v_head_size < 1 || problem.v_head_size > kMaxHeadSize) return "v_head_size is not between 1 and 256";
  if (problem.head_size % 8 != 0 || problem.v_head_size % 8 != 0) return "a head size is not a multiple of 8";
  if (problem.q_len > kMaxLength || problem.kv_len > kMaxLength) return "a sequence is longer than 2^29";
  if (problem.batch * problem.q_heads > kMaxBlocks / ((problem.q_len + kMinBlockRows - 1) / kMinBlockRows + 1)) {
    return "there are more than 2^31 blocks of query rows";
  }
  // Q times the bias of K is the same for all keys of a row: the softmax does not see it, but these two would.
  if (problem.k_bias && !problem.append.active && (problem.softcap != 0 || problem.lse)) {
    return "K has a projection bias that no append adds, together with softcap or a log-sum-exp output";
  }
  const int64_t batch = problem.batch;
  if (!rows_are_aligned(problem.q, batch, problem.q_heads, problem.q_len)) return "rows of Q are not 16-byte aligned";
  if (!rows_are_aligned(problem.y, batch, problem.q_heads, problem.q_len)) return "rows of Y are not 16-byte aligned";
  if (problem.kv_len > 0) {
    if (!rows_are_aligned(problem.k, batch, problem.kv_heads, problem.kv_len)) return "rows of K are not 16-byte aligned";
    if (!rows_are_aligned(problem.v, batch, problem.kv_heads, problem.kv_len)) return "rows of V are not 16-byte aligned";
  }
  return nullptr;
}

}  // namespace onnx_attn::cuda
