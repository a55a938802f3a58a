// grid_size.h: the thread blocks of a launch whose blocks loop over more work than a grid may have. Host.
#pragma once

#include <algorithm>
#include <cstdint>

namespace onnx_attn {

inline int grid_size(int64_t blocks) { return static_cast<int>(std::min(blocks, int64_t{INT32_MAX})); }

}  // namespace onnx_attn
