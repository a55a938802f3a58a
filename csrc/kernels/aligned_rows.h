// aligned_rows.h: whether rows of 16-bit elements can be moved 16 bytes at a time. Host.
#pragma once

#include <cstdint>

#include "../problem.h"

namespace onnx_attn {

// The stride of an axis with one entry is never used.
inline bool rows_are_aligned(const Tensor4& tensor, int64_t batch, int64_t heads, int64_t rows) {
  const auto aligned = [](int64_t extent, int64_t stride) { return extent <= 1 || stride % 8 == 0; };
  return reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0 && aligned(batch, tensor.batch_stride) && aligned(heads, tensor.head_stride) &&
         aligned(rows, tensor.row_stride);
}

}  // namespace onnx_attn
