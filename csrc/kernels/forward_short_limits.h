// forward_short_limits.h: the shared memory and the warpgroups of the forward kernel for short sequences. Pure, host and device.
#pragma once

#include "../problem.h"

namespace onnx_attn::forward_short_kernel {

inline constexpr int kBlockRows = 64;      // of queries, that a warpgroup computes at a time
inline constexpr int kMostWarpgroups = 4;  // of a multiprocessor, and so of a block: 128 registers for each thread
inline constexpr int kMultiprocessorBytes = 228 * 1024, kBlockOwnBytes = 1024;  // shared memory; what each block takes besides its own

// Head sizes are rounded up to 64 or 128. Scores and output of a warpgroup share its registers: large heads have smaller tiles of keys.
ONNX_ATTN_HOST_DEVICE constexpr int tile_keys(int head_size) { return head_size <= 64 ? 128 : 64; }

// Q, and then the output, in blocks of 64 rows; tiles of K; tiles of V; what is added to the scores of each key.
struct SharedLayout {
  int head_size, row_blocks, tiles;  // head size: 64 or 128

  ONNX_ATTN_HOST_DEVICE constexpr int query_bytes() const { return kBlockRows * head_size * 2; }  // of a block of rows
  ONNX_ATTN_HOST_DEVICE constexpr int tile_bytes() const { return tile_keys(head_size) * head_size * 2; }
  ONNX_ATTN_HOST_DEVICE constexpr int keys() const { return row_blocks * query_bytes(); }
  ONNX_ATTN_HOST_DEVICE constexpr int values() const { return keys() + tiles * tile_bytes(); }
  ONNX_ATTN_HOST_DEVICE constexpr int key_row() const { return values() + tiles * tile_bytes(); }
  ONNX_ATTN_HOST_DEVICE constexpr int bytes() const { return key_row() + tiles * tile_keys(head_size) * 4; }
};

SharedLayout choose_layout(const Problem& problem);

// Of a block. A head's own warpgroups share its work where other heads do not fill the multiprocessor. Bits do not depend on it.
int choose_warpgroups(const Problem& problem, int sm_count);

}  // namespace onnx_attn::forward_short_kernel
