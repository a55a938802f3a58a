// forward_float32_limits.h: sizes that the float32 forward kernel and its refusals share.
#pragma once

namespace onnx_attn {

// Shared memory of a block for head sizes above 128, mask tile included.
inline constexpr int kLargeHeadBytes = 104 * 1024;

}  // namespace onnx_attn
