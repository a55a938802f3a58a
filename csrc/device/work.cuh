// work.cuh: which block of query rows a thread block computes, and which key tiles it visits.
#pragma once

#include <algorithm>

#include "../key_range.h"

namespace onnx_attn::device {

// Row blocks of all (batch, head) pairs in the order in which thread blocks start. Heads are walked in bands; inside a band
// the last row blocks come first, since under causality they are the longest, and the heads of one row block, which share
// keys or a mask, are neighbours.
struct WorkOrder {
  int64_t heads = 0;       // batch * q_heads
  int64_t row_blocks = 0;  // of one head
  int64_t band = 1;        // heads
  int64_t group = 1;       // query heads of a K/V head
};

inline WorkOrder order_work(const Problem& problem, int64_t rows_per_block) {
  // With all heads in one band the longest blocks of a causal call start first and no long one is left for the end: 395 TFLOP/s
  // at 2,16,8192,128 on an H200 (2026-11-30), against 340 with bands of 6 heads that stay in L2. Beyond 64 heads fewer than 4 of the blocks
  // that run at a time would share a head's keys.
  constexpr int64_t kBandHeads = 64;
  WorkOrder order;
  order.heads = problem.batch * problem.q_heads;
  order.row_blocks = (problem.q_len + rows_per_block - 1) / rows_per_block;
  order.group = problem.q_heads / problem.kv_heads;
  const int64_t kv_heads = problem.batch * problem.kv_heads, bands = std::max(int64_t{1}, (order.heads + kBandHeads - 1) / kBandHeads);
  order.band = (kv_heads + bands - 1) / bands * order.group;  // even bands: a short last one would be a long tail
  return order;
}

struct Work {
  int batch, q_head, kv_head;
  int first_row;
};

__device__ __forceinline__ Work find_work(const WorkOrder& order, const Problem& problem, int rows_per_block) {
  const uint32_t band = static_cast<uint32_t>(order.band), row_blocks = static_cast<uint32_t>(order.row_blocks);
  const uint32_t band_index = blockIdx.x / (band * row_blocks), in_band = blockIdx.x % (band * row_blocks);
  const uint32_t first_head = band_index * band;
  const uint32_t left = static_cast<uint32_t>(order.heads) - first_head;
  const uint32_t band_heads = left < band ? left : band;
  const uint32_t head = first_head + in_band % band_heads;
  const uint32_t q_heads = static_cast<uint32_t>(problem.q_heads);
  Work work;
  work.batch = static_cast<int>(head / q_heads);
  work.q_head = static_cast<int>(head % q_heads);
  work.kv_head = static_cast<int>(head % q_heads / static_cast<uint32_t>(order.group));
  work.first_row = static_cast<int>(row_blocks - 1 - in_band / band_heads) * rows_per_block;
  return work;
}

// Tiles [begin, end) hold every key that the rows can see; in tiles [whole_begin, whole_end) every row sees every key, as
// far as length, causality and windows go.
struct TileRange {
  int begin, whole_begin, whole_end, end;

  __device__ __forceinline__ bool is_whole(int tile) const { return tile >= whole_begin && tile < whole_end; }
};

template <int kKeys>
__device__ __forceinline__ TileRange tile_range(const Mask& mask, const RowPosition& position, const KeyRange& keys, int64_t first_row,
                                                int64_t end_row) {
  TileRange tiles{0, 0, 0, 0};
  if (keys.begin >= keys.end) return tiles;
  int64_t whole_begin = keys.begin, whole_end = keys.end;
  if (mask.right >= 0) whole_end = min(whole_end, max(int64_t{0}, first_row + position.offset + mask.right + 1));
  if (mask.left >= 0) whole_begin = max(whole_begin, end_row - 1 + position.offset - mask.left);
  tiles.begin = static_cast<int>(keys.begin / kKeys);
  tiles.end = static_cast<int>((keys.end + kKeys - 1) / kKeys);
  tiles.whole_end = max(tiles.begin, static_cast<int>(whole_end / kKeys));
  tiles.whole_begin = static_cast<int>(min((whole_begin + kKeys - 1) / kKeys, static_cast<int64_t>(tiles.whole_end)));
  return tiles;
}

}  // namespace onnx_attn::device
