// forward_float32_limits.cpp: which problems the float32 forward kernel can run, why not the others, and its workspace.
#include "forward_float32_limits.h"

#include <algorithm>

#include "../launch.h"
#include "kernel_limits.h"
#include "split_sizes.h"

namespace onnx_attn::cuda {

namespace {
constexpr int64_t kMinBlockRows = 64;
}  // namespace

const char* forward_float32_refusal(const Problem& problem, const Device& device) {
  if (problem.dtype != DType::f32) return "Q is not float32";
  if (problem.v_dtype == DType::f64) return "V is float64";
  if (const char* reason = forward_refusal(problem)) return reason;
  const int64_t head_size = std::max(problem.head_size, problem.v_head_size);
  if (head_size > split::kMaxColumns) return "a head size is above 256";
  if (problem.v_head_size < 1) return "v_head_size is 0";
  if (head_size > 128 && device.max_shared_memory < kLargeHeadBytes) return "head sizes above 128 need 104 KB of shared memory";
  const auto blocks = [&](int64_t heads, int64_t rows, int64_t block_rows) {
    return problem.batch * heads > kMaxBlocks / (rows / block_rows + 1);
  };
  if (blocks(problem.q_heads, problem.q_len, kMinBlockRows)) return "there are more than 2^31 blocks of query rows";
  if (blocks(problem.kv_heads, split::padded_rows(problem.kv_len), 16)) return "there are more than 2^31 blocks of keys";
  return nullptr;
}

int64_t forward_float32_workspace_bytes(const Problem& problem) {
  return 2 * split::split_bytes(problem, std::max(problem.head_size, problem.v_head_size));
}

}  // namespace onnx_attn::cuda
