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
  return HeadLayout{head_size, blocks(problem.q_len, kBlockRows), blocks(problem.kv_len, kTileKeys)};
}

// Heads that fit into the shared memory of a thread block.
int room(const HeadLayout& layout) { return static_cast<int>((kHopperSharedBytes - kControlBytes) / layout.bytes()); }

}  // namespace

BlockPlan plan_block(const Problem& problem, int sm_count) {
  BlockPlan plan{layout_of(problem)};
  plan.heads = static_cast<int>(problem.batch * problem.q_heads);
  plan.blocks = std::min(plan.heads, sm_count);
  const int most_heads = (plan.heads + plan.blocks - 1) / plan.blocks;  // of a block
  plan.slots = std::min({kMostSlots, room(plan.layout), most_heads});
  plan.computing = warpgroups_of(plan.layout.head_size) - (plan.slots < most_heads);
  return plan;
}

}  // namespace onnx_attn::forward_short_kernel

namespace onnx_attn::cuda {

namespace {

// Up to here the kernel is faster than forward_sm90 on every shape that was timed; beyond, two heads rarely fit.
constexpr int64_t kLongest = forward_short_kernel::kMostKeys, kMaxHeadSize = 128;
constexpr int64_t kMaxHeads = INT32_MAX - 4096;  // a head and a stride between heads fit into an int

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
  // With a single slot nothing would hide the copies of the next head.
  if (room(layout_of(problem)) < 2) return "two heads do not fit into shared memory";
  const int64_t batch = problem.batch;
  if (!has_aligned_rows(problem.q, batch, problem.q_heads, problem.q_len)) return "rows of Q are not 16-byte aligned";
  if (!has_aligned_rows(problem.y, batch, problem.q_heads, problem.q_len)) return "rows of Y are not 16-byte aligned";
  if (!has_aligned_rows(problem.k, batch, problem.kv_heads, problem.kv_len)) return "rows of K are not 16-byte aligned";
  if (!has_aligned_rows(problem.v, batch, problem.kv_heads, problem.kv_len)) return "rows of V are not 16-byte aligned";
  return mask_refusal(problem);
}

}  // namespace onnx_attn::cuda
