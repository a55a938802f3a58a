// output_weight.cuh: softmax weights that are an output, and not only terms of a sum.
#pragma once

namespace onnx_attn::device {

// exp2_fast has no results below 2^-126, and a weight may be one: it is computed 2^kLift times as large, and multiplied by kUnlift.
inline constexpr float kLift = 24.0f, kUnlift = 1.0f / (1 << 24);

}  // namespace onnx_attn::device
