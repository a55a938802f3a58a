// forward_short_limits.h: how the forward kernel for short sequences divides its work. Pure, host and device.
#pragma once

#include "../problem.h"

namespace onnx_attn::forward_short_kernel {

inline constexpr int kBlockRows = 64;       // of queries, that a warpgroup computes at a time
inline constexpr int kTileKeys = 64;        // that meet them at a time
inline constexpr int kMostKeys = 256;       // and queries
inline constexpr int kMostSlots = 8;        // for heads in shared memory
inline constexpr int kControlBytes = 1024;  // of shared memory, beside the slots

// Of a thread block, one on a multiprocessor: as many as registers allow, 96 or 128 for a thread.
ONNX_ATTN_HOST_DEVICE constexpr int warpgroups_of(int head_size) { return head_size <= 64 ? 5 : 4; }

// A head in shared memory: Q, and then the output, in blocks of 64 rows; tiles of K; tiles of V; what is added to the scores of each key.
struct HeadLayout {
  int head_size, row_blocks, tiles;  // head size: 64 or 128, rounded up

  ONNX_ATTN_HOST_DEVICE constexpr int query_bytes() const { return kBlockRows * head_size * 2; }  // of a block of rows
  ONNX_ATTN_HOST_DEVICE constexpr int tile_bytes() const { return kTileKeys * head_size * 2; }
  ONNX_ATTN_HOST_DEVICE constexpr int keys() const { return row_blocks * query_bytes(); }
  ONNX_ATTN_HOST_DEVICE constexpr int values() const { return keys() + tiles * tile_bytes(); }
  ONNX_ATTN_HOST_DEVICE constexpr int key_row() const { return values() + tiles * tile_bytes(); }
  ONNX_ATTN_HOST_DEVICE constexpr int bytes() const { return (key_row() + tiles * kTileKeys * 4 + 1023) / 1024 * 1024; }
};

// How heads are divided among thread blocks. Bits do not depend on it.
struct BlockPlan {
  HeadLayout layout;
  int heads, blocks;  // in all; block b has heads b, b + blocks ...
  int slots;          // for heads of a thread block
  int computing;      // warpgroups that compute: all, or all but the one that has slots to fill again

  ONNX_ATTN_HOST_DEVICE constexpr int bytes() const { return slots * layout.bytes() + kControlBytes; }
};

BlockPlan plan_block(const Problem& problem, int sm_count);

}  // namespace onnx_attn::forward_short_kernel
