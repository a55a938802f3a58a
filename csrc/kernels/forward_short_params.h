// forward_short_params.h: what the forward kernel for short sequences is told.
#pragma once

#include "forward_short_limits.h"

namespace onnx_attn::forward_short_kernel {

inline constexpr int kFar = 1 << 20;  // beyond every key and row

struct ForwardParams {
  Problem problem;
  SharedLayout layout;
  float scale = 1;
  float raw_unit = 1;             // binary orders in a product of Q and K
  bool must_scale = false;        // they are none, or too many or too few for an exponent: products are multiplied first
  int columns = 0;                // keys that a tensor mask speaks of, or all
  int begin = -kFar, end = kFar;  // row i sees keys [begin + i, end + i), both further on where the offset follows the length
};

}  // namespace onnx_attn::forward_short_kernel
