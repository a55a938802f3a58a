// forward_short_limits.cpp: which problems the forward kernel for short sequences can run, and why not the others.
#include "forward_short_limits.h"

#include <algorithm>

#include "../launch.h"
#include "kernel_limits.h"

namespace onnx_attn::forward_short_kernel {

namespace {

HeadLayout layout_of(const Problem& problem) {
  const auto blocks = [](int64_t rows, int64_t size) { return static_cast<int>((rows + size - 1) / size); };
  const int head_size = std::max(problem.head_size, problem.v_head_size) <= 64 ? 64 : 128;
  return HeadLayout{head_size, blocks(problem.q_len, kBlockRows), blocks(problem.kv_len, tile_keys(head_size))};
}

// Thread blocks of one head that a multiprocessor has room for.
int single_heads(const HeadLayout& layout) { return kMultiprocessorBytes / (layout.bytes() + kControlBytes + kBlockOwnBytes); }

}  // namespace

// Where all heads fit into the multiprocessors at once, a thread block has all heads of its multiprocessor: it asks for the first one
// first, and all warpgroups work on what is there. Else a head is a block, and others begin whenever one ends.
BlockPlan plan_block(const Problem& problem, int sm_count) {
  BlockPlan plan{layout_of(problem), 1, 1};
  const int64_t heads = (problem.batch * problem.q_heads + sm_count - 1) / sm_count;  // of a multiprocessor
  const bool fits = heads <= kMostHeads && heads * plan.layout.bytes() + kControlBytes <= kHopperSharedBytes;
  if (fits) plan.heads = static_cast<int>(heads);
  const int64_t sharing = fits ? 1 : std::max(1, single_heads(plan.layout));
  plan.warpgroups = static_cast<int>(std::clamp<int64_t>(kMostWarpgroups / sharing, 1, plan.heads * plan.layout.row_blocks));
  return plan;
}

}  // namespace onnx_attn::forward_short_kernel

namespace onnx_attn::cuda {

namespace {

// Beyond this, heads that are computed in a pipeline should win; not measured.
constexpr int64_t kLongest = 256, kMaxHeadSize = 128;
constexpr int64_t kMaxHeads = INT32_MAX - forward_short_kernel::kMostHeads;

const char* mask_refusal(const Problem& problem) {
  const TensorMask& mask = problem.mask.tensor;
  const Padding& padding = problem.mask.padding;
  if (mask.kind != TensorMask::Kind::none && mask.query_stride != 0 && problem.q_len > 1) return "the mask has a query axis";
  if (padding.kind == Padding::Kind::keep && padding.query_stride != 0 && problem.q_len > 1) return "the key padding mask has a query axis";
  return nullptr;
}

}  // namespace

const char* forward_short_refusal(const Problem& problem) {
  using namespace forward_short_kernel;
  if (const char* reason = half_forward_refusal(problem)) return reason;
  if (const char* reason = unfinished_refusal(problem)) return reason;
  if (problem.softcap != 0) return "softcap was asked for";
  if (problem.head_size > kMaxHeadSize || problem.v_head_size > kMaxHeadSize) return "a head size is above 128";
  if (problem.head_size % 8 != 0 || problem.v_head_size % 8 != 0) return "a head size is not a multiple of 8";
  if (problem.v_head_size < 1) return "V has no columns";
  if (problem.q_len > kLongest) return "there are more than 256 queries";
  if (problem.kv_len > kLongest) return "there are more than 256 keys";
  if (problem.kv_len < 1) return "there are no keys";
  if (problem.batch * problem.q_heads > kMaxHeads) return "there are more than 2^31 heads";
  // Alone on a multiprocessor a head would have nothing to hide its copies behind.
  if (single_heads(layout_of(problem)) < 2) return "two heads do not fit into shared memory";
  const int64_t batch = problem.batch;
  if (!has_aligned_rows(problem.q, batch, problem.q_heads, problem.q_len)) return "rows of Q are not 16-byte aligned";
  if (!has_aligned_rows(problem.y, batch, problem.q_heads, problem.q_len)) return "rows of Y are not 16-byte aligned";
  if (!has_aligned_rows(problem.k, batch, problem.kv_heads, problem.kv_len)) return "rows of K are not 16-byte aligned";
  if (!has_aligned_rows(problem.v, batch, problem.kv_heads, problem.kv_len)) return "rows of V are not 16-byte aligned";
  return mask_refusal(problem);
}

}  // namespace onnx_attn::cuda
