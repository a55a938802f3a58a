// scores_limits.cpp: which score outputs the scores kernel can write, why not the others, and its workspace.
#include <cmath>

#include "../launch.h"
#include "kernel_limits.h"
#include "scores_sizes.h"
#include "split_sizes.h"

namespace onnx_attn::cuda {

const char* scores_refusal(const Problem& problem, const Device& device) {
  if (device.capability < 80) return "the scores kernel needs compute capability 8.0";
  if (problem.dtype == DType::f64) return "scores of float64 were asked for";
  if (problem.compute != DType::f32) return "scores of a softmax in float64 were asked for";
  if (problem.beams.index) return "the cache is read through a beam index";
  if (problem.dtype == DType::f32) {
    if (problem.head_size > split::kMaxColumns) return "scores of float32 with a head_size above 256 were asked for";
  } else {
    if (problem.head_size % 8 != 0) return "scores of a head_size that is not a multiple of 8 were asked for";
    if (!has_aligned_rows(problem.q, problem.batch, problem.q_heads, problem.q_len)) return "rows of Q are not 16-byte aligned";
    if (!has_aligned_rows(problem.k, problem.batch, problem.kv_heads, problem.kv_len)) return "rows of K are not 16-byte aligned";
    if (problem.k_bias && !problem.append.active) return "K has a projection bias that no append adds";
  }
  if (scores_kernel::block_bytes(problem) > device.max_shared_memory) return "scores of this head_size need more shared memory";
  if (problem.q_len > kMaxLength || problem.kv_len > kMaxLength) return "a sequence is longer than 2^29";
  const int64_t tiles = (problem.kv_len + scores_kernel::kKeys - 1) / scores_kernel::kKeys;
  if (problem.batch * problem.q_heads > kMaxBlocks / ((problem.q_len / scores_kernel::rows(problem.dtype) + 1) * (tiles + 1))) {
    return "there are more than 2^31 tiles of scores";
  }
  const Padding& padding = problem.mask.padding;
  if (problem.score_mode == ScoreMode::mha_logits && problem.mask.right >= 0 && padding.kind != Padding::Kind::none &&
      !(std::fabs(padding.filter) < 1e30f)) {  // else it vanishes beside the lowest float32
    return "causality and padding both add about the lowest float32";
  }
  return nullptr;
}

int64_t scores_workspace_bytes(const Problem& problem) {
  return problem.dtype == DType::f32 ? split::split_bytes(problem, problem.head_size) : 0;
}

}  // namespace onnx_attn::cuda
