// raw_unit.h: scores that stay products of Q and K, with the scale in the exponent. Pure, and there without CUDA too.
#pragma once

#include "problem.h"

namespace onnx_attn {

inline constexpr double kExactLog2e = 1.4426950408889634;

// Binary orders in a product of Q and K.
inline float raw_unit(const Problem& problem) { return static_cast<float>(problem.scale * kExactLog2e); }

// Neither too many for an exponent nor too few; 0 would make NaN of excluded scores.
inline bool is_usual_unit(float unit) { return unit >= 1e-6f && unit <= 1; }

}  // namespace onnx_attn
