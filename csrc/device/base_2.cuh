// base_2.cuh: exponentials by way of 2^x: the constants, and the softcap.
#pragma once

#include "../raw_unit.h"
#include "ptx_sm80.cuh"

namespace onnx_attn::device {

inline constexpr float kLog2e = static_cast<float>(kExactLog2e);
inline constexpr float kLn2 = 0.6931471805599453f;

// cap * tanh(x) as cap - 2 * cap / (1 + e^2x), where e^2x = 2^(score * exponent): within 2^-23 of the cap. tanh.approx would be off by
// up to cap / 2000.
__device__ __forceinline__ float capped(float score, float exponent, float cap) {
  return fmaf(-2.0f * cap, reciprocal_fast(1.0f + exp2_fast(score * exponent)), cap);
}

}  // namespace onnx_attn::device
