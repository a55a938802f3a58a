// forward_short_params.h: what the forward kernel for short sequences is told.
#pragma once

#include "forward_short_limits.h"

namespace onnx_attn::forward_short_kernel {

inline constexpr int kFar = 1 << 20;  // beyond every key and row

// n / divisor for 0 <= n < 2^31, without the long way of an integer division.
struct Divisor {
  uint32_t multiplier = 0;
  int shift = 31;

  Divisor() = default;
  explicit Divisor(int64_t divisor) {
    while ((int64_t{1} << (shift - 31)) < divisor) ++shift;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << shift) + divisor - 1) / divisor);
  }
  ONNX_ATTN_HOST_DEVICE int divide(int n) const { return static_cast<int>(static_cast<uint64_t>(n) * multiplier >> shift); }
};

struct ForwardParams {
  Problem problem;
  BlockPlan plan;
  Divisor q_heads, group;  // group: query heads of a K/V head
  float scale = 1;
  float raw_unit = 1;             // binary orders in a product of Q and K
  bool must_scale = false;        // not a usual unit: products are multiplied by the scale first
  int columns = 0;                // keys that a tensor mask speaks of, or all
  int begin = -kFar, end = kFar;  // row i sees keys [begin + i, end + i), both further on where the offset follows the length
};

}  // namespace onnx_attn::forward_short_kernel
