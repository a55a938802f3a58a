// forward_sm80_limits.cpp: which problems the portable tensor-core forward kernel can run, and why not the others.
#include "../launch.h"
#include "kernel_limits.h"

namespace onnx_attn::cuda {

namespace {

constexpr int64_t kMaxHeadSize = 256;
constexpr int64_t kMinBlockRows = 64;

}  // namespace

const char* forward_sm80_refusal(const Problem& problem) {
  if (const char* reason = half_forward_refusal(problem)) return reason;
  if (problem.head_size < 1 || problem.head_size > kMaxHeadSize) return "head_size is not between 1 and 256";
  if (problem.v_head_size < 1 || problem.v_head_size > kMaxHeadSize) return "v_head_size is not between 1 and 256";
  if (problem.head_size % 8 != 0 || problem.v_head_size % 8 != 0) return "a head size is not a multiple of 8";
  if (problem.batch * problem.q_heads > kMaxBlocks / ((problem.q_len + kMinBlockRows - 1) / kMinBlockRows + 1)) {
    return "there are more than 2^31 blocks of query rows";
  }
  // Q times the bias of K is the same for all keys of a row: the softmax does not see it, but these two would.
  if (problem.k_bias && !problem.append.active && (problem.softcap != 0 || problem.lse)) {
    return "K has a projection bias that no append adds, together with softcap or a log-sum-exp output";
  }
  const int64_t batch = problem.batch;
  if (!has_aligned_rows(problem.q, batch, problem.q_heads, problem.q_len)) return "rows of Q are not 16-byte aligned";
  if (!has_aligned_rows(problem.y, batch, problem.q_heads, problem.q_len)) return "rows of Y are not 16-byte aligned";
  if (problem.kv_len > 0) {
    if (!has_aligned_rows(problem.k, batch, problem.kv_heads, problem.kv_len)) return "rows of K are not 16-byte aligned";
    if (!has_aligned_rows(problem.v, batch, problem.kv_heads, problem.kv_len)) return "rows of V are not 16-byte aligned";
  }
  return nullptr;
}

}  // namespace onnx_attn::cuda
