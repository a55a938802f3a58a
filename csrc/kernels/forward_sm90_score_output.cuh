// forward_sm90_score_output.cuh: the scores output of the Hopper forward kernel. Tiles leave from the loop that makes them, by way of
// shared memory; one warp writes what no row sees.
#pragma once

#include "forward_sm90_scores.cuh"

namespace onnx_attn::forward_sm90_kernel {

// Stores a warp's part of a tile times `scale`, by way of the warp's part of a place for tiles. The bulk copies have long read what was
// there, kPlaces tiles ago. `row`: of the warp, in the block.
template <class Element, class Shape, int kPlaces>
__device__ __forceinline__ void store_scores(const Scores<Shape>& scores, float scale, uint32_t tile_place, const CUtensorMap& map,
                                             const RowBlock<Shape>& block, int row, int tile_key) {
  constexpr int kPanelColumns = 64, kPanels = Shape::kKeys / kPanelColumns, kPlacePanelBytes = 16 * kPanelBytes;
  static_assert(Shape::kScoreBytes == Shape::kRows * kPanels * kPanelBytes);
  const uint32_t place = tile_place + row * kPanels * kPanelBytes;
  const int lane = lane_index();
  if (lane == 0) bulk_store_wait_read<kPlaces - 1>();
  __syncwarp();
  // Lanes 0-15 name the rows of column tile j, lanes 16-31 those of column tile j + 1.
  const uint32_t start = place + lane % 16 * kPanelBytes, lane_chunk = (lane / 16 ^ lane % 8) << 4;
#pragma unroll
  for (int j = 0; j < Shape::kKeys / 8; j += 2) {
    const auto packed = [&](int tile, int e) {
      return pack<Element>(scores.value[0][tile][e] * scale, scores.value[0][tile][e + 1] * scale);
    };
    store_matrices(start + j / 8 * kPlacePanelBytes + (static_cast<uint32_t>(j % 8 * 16) ^ lane_chunk), packed(j, 0), packed(j, 2),
                   packed(j + 1, 0), packed(j + 1, 2));
  }
  publish_to_bulk_copies();
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      bulk_store(place + panel * kPlacePanelBytes, map, tile_key + panel * kPanelColumns, block.first_row + row, block.q_head, block.batch);
    }
    bulk_store_commit();
  }
}

// Shared memory must outlive the stores. A warp calls.
__device__ __forceinline__ void wait_for_scores() {
  if (lane_index() == 0) bulk_store_wait();
}

// Writes `value` to the keys that no row of a warpgroup visits: ordinary stores of whole rows, which leave the copy engine to those who
// wait for it. A warp calls.
template <class Element, class Shape, class Shared>
__device__ __forceinline__ void fill_invisible_scores(Shared& shared, const Problem& problem, float value) {
  const uint32_t pair = pack<Element>(value, value);
  const uint4 hidden = make_uint4(pair, pair, pair, pair);
  const int columns = static_cast<int>(problem.kv_len);
  const auto fill = [&](Element* line, int begin, int end) {
    constexpr int kVector = 8;  // elements of a store
    uint4* out = reinterpret_cast<uint4*>(line + begin) + lane_index();
    int left = (end - begin) / kVector - lane_index();
#pragma unroll 1
    for (; left > 3 * 32; left -= 4 * 32, out += 4 * 32) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[i * 32] = hidden;
    }
#pragma unroll 1
    for (; left > 0; left -= 32, out += 32) *out = hidden;
  };
#pragma unroll 1
  for (int round = 0;; ++round) {
    shared.block_ring.wait_full(round);
    const RowBlock<Shape>& block = shared.blocks[shared.block_ring.stage(round)];
    if (block.first_row == RowBlock<Shape>::kNoRow) return;
    const int64_t first_row = (static_cast<int64_t>(block.batch) * problem.q_heads + block.q_head) * problem.q_len + block.first_row;
    const int rows = static_cast<int>(problem.q_len) - block.first_row;
    Element* line = static_cast<Element*>(problem.scores) + first_row * columns;
#pragma unroll 1
    for (int i = 0; i < Shape::kWarpgroups; ++i) {
      const int begin = min(columns, block.own[i].begin * Shape::kKeys);
      const int end = min(columns, max(block.own[i].begin, block.own[i].end) * Shape::kKeys);
      __syncwarp();
      if (i == Shape::kWarpgroups - 1 && lane_index() == 0) shared.block_ring.release(round);
#pragma unroll 1
      for (int row = i * kWarpgroupRows; row < min(rows, (i + 1) * kWarpgroupRows); ++row, line += columns) {
        fill(line, 0, begin);
        fill(line, end, columns);
      }
    }
  }
}

}  // namespace onnx_attn::forward_sm90_kernel
