// forward_short_limits.h: how the forward kernel for short sequences divides its work. Pure, host and device.
#pragma once

#include "../problem.h"

namespace onnx_attn::forward_short_kernel {

inline constexpr int kBlockRows = 64;      // of queries, that a warpgroup computes at a time
inline constexpr int kMostWarpgroups = 4;  // of a multiprocessor, and so of a thread block: 128 registers for each thread
inline constexpr int kMostHeads = 4;       // of a thread block
inline constexpr int kControlBytes = 256;  // of shared memory, beside its heads
inline constexpr int kMultiprocessorBytes = 228 * 1024, kBlockOwnBytes = 1024;  // of Hopper's shared memory

// Head sizes are rounded up to 64 or 128. Scores and output of a warpgroup share its registers: large heads have smaller tiles of keys.
ONNX_ATTN_HOST_DEVICE constexpr int tile_keys(int head_size) { return head_size <= 64 ? 128 : 64; }

// A head in shared memory: Q, and then the output, in blocks of 64 rows; tiles of K; tiles of V; what is added to the scores of each key.
struct HeadLayout {
  int head_size, row_blocks, tiles;  // head size: 64 or 128

  ONNX_ATTN_HOST_DEVICE constexpr int query_bytes() const { return kBlockRows * head_size * 2; }  // of a block of rows
  ONNX_ATTN_HOST_DEVICE constexpr int tile_bytes() const { return tile_keys(head_size) * head_size * 2; }
  ONNX_ATTN_HOST_DEVICE constexpr int keys() const { return row_blocks * query_bytes(); }
  ONNX_ATTN_HOST_DEVICE constexpr int values() const { return keys() + tiles * tile_bytes(); }
  ONNX_ATTN_HOST_DEVICE constexpr int key_row() const { return values() + tiles * tile_bytes(); }
  ONNX_ATTN_HOST_DEVICE constexpr int bytes() const { return (key_row() + tiles * tile_keys(head_size) * 4 + 1023) / 1024 * 1024; }
};

// What a thread block does. Bits do not depend on it.
struct BlockPlan {
  HeadLayout layout;
  int heads, warpgroups;

  ONNX_ATTN_HOST_DEVICE constexpr int bytes() const { return heads * layout.bytes() + kControlBytes; }
};

BlockPlan plan_block(const Problem& problem, int sm_count);

}  // namespace onnx_attn::forward_short_kernel
