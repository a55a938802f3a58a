// split_rows.h: keys or values of float32 calls, split into float16 pairs in the workspace before tensor cores meet them.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "split_sizes.h"

namespace onnx_attn::split {

struct SplitTensor {
  const __half* halves = nullptr;  // [batch, heads, padded rows, 2, padded columns]: high halves, then low ones
  const float* factors = nullptr;  // [batch, heads, padded rows]
  int64_t rows = 0;                // padded
  int64_t columns = 0;             // padded
};

// Parts of `workspace`, which has split_bytes() and is 16-byte aligned.
SplitTensor split_tensor(const Problem& problem, int64_t columns, void* workspace);

// K, or V, of a call into `target`, with the projection bias that no append adds. Rows at or past the length become zeros.
cudaError_t split_keys(const Problem& problem, const SplitTensor& target, cudaStream_t stream);
cudaError_t split_values(const Problem& problem, const SplitTensor& target, cudaStream_t stream);

}  // namespace onnx_attn::split
