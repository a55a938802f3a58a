// forward_sm90_dealer.cuh: the warp of the Hopper forward kernel that finds the next block of rows, and what is to be known of it, while
// the others are still busy with the blocks before.
#pragma once

#include <climits>

#include "../device/convert.cuh"
#include "forward_sm90_block.cuh"

namespace onnx_attn::forward_sm90_kernel {

// The keys that a mask without a query axis keeps: all of [begin, end), or only some of them.
struct KeptKeys {
  int begin = 0, end = INT_MAX;
  bool has_gaps = false;
};

// read(first) returns a bit for each of the kWidth keys from `first` on, whether it is kept. A warp looks at all of them.
template <int kWidth, class Read>
__device__ __forceinline__ KeptKeys scan_keys(int columns, Read&& read) {
  int begin = INT_MAX, end = 0, count = 0;
#pragma unroll 1
  for (int first = lane_index() * kWidth; first < columns; first += 32 * kWidth) {
    const uint32_t bits = read(first);
    if (bits == 0) continue;
    begin = min(begin, first + __ffs(bits) - 1);
    end = max(end, first + 32 - __clz(bits));
    count += __popc(bits);
  }
  begin = __reduce_min_sync(~0u, begin);
  end = __reduce_max_sync(~0u, end);
  count = __reduce_add_sync(~0u, count);
  if (count == 0) return KeptKeys{0, 0, false};
  return KeptKeys{begin, end, end - begin != count};
}

template <class IsKept>
__device__ __forceinline__ KeptKeys scan_elements(int columns, IsKept&& is_kept) {
  constexpr int kWidth = 4;
  return scan_keys<kWidth>(columns, [&](int first) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) bits |= (first + i < columns && is_kept(min(first + i, columns - 1)) ? 1u : 0u) << i;
    return bits;
  });
}

// A bit for each non-zero byte of a word.
__device__ __forceinline__ uint32_t nonzero_bytes(uint32_t word) { return (__vcmpne4(word, 0) & 0x01010101u) * 0x01020408u >> 24; }

__device__ __forceinline__ KeptKeys scan_mask_row(const Problem& problem, int batch, int q_head) {
  const TensorMask& mask = problem.mask.tensor;
  const int columns = static_cast<int>(min(mask.columns, problem.kv_len));
  const uint8_t* row = static_cast<const uint8_t*>(mask.data) + batch * mask.batch_stride + q_head * mask.head_stride;
  if (reinterpret_cast<uintptr_t>(row) % 16 == 0 && columns % 16 == 0) {
    return scan_keys<16>(columns, [&](int first) {
      const uint4 keep = __ldg(reinterpret_cast<const uint4*>(row + first));
      return nonzero_bytes(keep.x) | nonzero_bytes(keep.y) << 4 | nonzero_bytes(keep.z) << 8 | nonzero_bytes(keep.w) << 12;
    });
  }
  return scan_elements(columns, [&](int key) { return __ldg(row + key) != 0; });
}

__device__ __forceinline__ KeptKeys read_padding_length(const Problem& problem, int batch) {
  const Padding& padding = problem.mask.padding;
  if (padding.kind != Padding::Kind::lengths) return KeptKeys();
  const Lengths lengths{padding.data, padding.dtype, padding.batch_stride};
  return KeptKeys{0, static_cast<int>(max(int64_t{0}, min(lengths.unclamped(batch), problem.kv_len))), false};
}

__device__ __forceinline__ KeptKeys scan_padding(const Problem& problem, int batch) {
  const Padding& padding = problem.mask.padding;
  KeptKeys kept;
  const int columns = static_cast<int>(min(padding.columns, problem.kv_len));
  with_integer_type(padding.dtype, [&](auto type) {
    const auto* row = static_cast<const decltype(type)*>(padding.data) + batch * padding.batch_stride;
    kept = scan_elements(columns, [&](int key) { return __ldg(row + key * padding.key_stride) > 0; });
  });
  return kept;
}

// The key tiles that some of the rows visit. Rows past the last query visit none.
template <class Shape>
__device__ __forceinline__ TileRange tiles_of(const Problem& problem, const RowPosition& position, const KeptKeys& kept, int first_row,
                                              int rows) {
  const int64_t end_row = min(int64_t{first_row} + rows, problem.q_len);
  if (first_row >= end_row) return TileRange{0, 0, 0, 0};
  KeyRange visible = visible_keys(problem.mask, position, first_row, end_row);
  visible.begin = max(visible.begin, int64_t{kept.begin});
  visible.end = min(visible.end, int64_t{kept.end});
  return tile_range<Shape::kKeys>(problem.mask, position, visible, first_row, end_row);
}

// Writes the block with this number; see WorkOrder. A warp calls, its lanes write different parts.
template <class Shape, ScoreWork kScoreWork>
__device__ __forceinline__ void describe_block(RowBlock<Shape>& block, const ForwardParams& params, int index) {
  const Problem& problem = params.problem;
  const Mask& mask = problem.mask;
  const uint32_t band = static_cast<uint32_t>(params.order.band), row_blocks = static_cast<uint32_t>(params.order.row_blocks);
  const uint32_t first_head = index / (band * row_blocks) * band, in_band = index % (band * row_blocks);
  const uint32_t band_heads = min(static_cast<uint32_t>(params.order.heads) - first_head, band);
  const uint32_t head = first_head + in_band % band_heads;
  const uint32_t fastest = static_cast<uint32_t>(params.is_batch_first ? problem.batch : problem.q_heads);
  const int batch = static_cast<int>(params.is_batch_first ? head % fastest : head / fastest);
  const int q_head = static_cast<int>(params.is_batch_first ? head / fastest : head % fastest);
  const int first_row = static_cast<int>(row_blocks - 1 - in_band / band_heads) * Shape::kRows;

  const RowPosition position = row_position(mask, batch, problem.q_len, problem.kv_len);
  KeptKeys kept, padded;
  if constexpr (has_mask(kScoreWork) && kScoreWork != ScoreWork::bias) {
    if (mask.tensor.kind == TensorMask::Kind::keep && params.mask.is_key_row) kept = scan_mask_row(problem, batch, q_head);
    padded = read_padding_length(problem, batch);
    if (kScoreWork == ScoreWork::masks && mask.padding.kind == Padding::Kind::keep) padded = scan_padding(problem, batch);
  }

  const int lane = lane_index();
  if (lane > Shape::kWarpgroups) return;
  if (lane < Shape::kWarpgroups) {
    block.own[lane] = tiles_of<Shape>(problem, position, kept, first_row + lane * kWarpgroupRows, kWarpgroupRows);
    return;
  }
  constexpr int64_t kFar = int64_t{1} << 30;  // twice the longest sequence
  const auto near = [](int64_t key) { return static_cast<int>(max(-kFar, min(kFar, key))); };
  block.batch = batch;
  block.q_head = q_head;
  block.kv_head = q_head / static_cast<int>(params.order.group);
  block.first_row = first_row;
  block.tiles = tiles_of<Shape>(problem, position, kept, first_row, Shape::kRows);
  block.begin = near(mask.left < 0 ? -kFar : first_row + position.offset - mask.left);
  block.end = near(mask.right < 0 ? kFar : first_row + position.offset + mask.right + 1);
  block.first_key = kept.begin;
  block.key_end = near(min(position.length, int64_t{kept.end}));
  if (mask.tensor.kind != TensorMask::Kind::none) block.key_end = min(block.key_end, near(mask.tensor.columns));
  block.length = near(position.length);
  block.padding_begin = padded.begin;
  block.padding_end = padded.end;
  block.reads_padding = padded.has_gaps;
  const bool is_scanned = mask.tensor.kind == TensorMask::Kind::keep && params.mask.is_key_row;
  block.reads_mask = params.mask.access != MaskAccess::none && (!is_scanned || kept.has_gaps);
  block.has_mask_tiles = block.reads_mask && params.mask.access == MaskAccess::tiles;
}

// describe(block, stage): what else the block's warps must know.
template <class Shape, ScoreWork kScoreWork, class Shared, class Describe>
__device__ __forceinline__ void deal_blocks(Shared& shared, const ForwardParams& params, Describe&& describe) {
  int index = blockIdx.x;
#pragma unroll 1
  for (int round = 0;; ++round) {
    RowBlock<Shape>& block = shared.blocks[shared.block_ring.stage(round)];
    const bool is_last = index >= params.blocks;
    shared.block_ring.wait_free(round);
    if (!is_last) {
      describe_block<Shape, kScoreWork>(block, params, index);
      describe(block, shared.block_ring.stage(round));
    } else if (lane_index() == 0) {
      block.first_row = RowBlock<Shape>::kNoRow;
    }
    __syncwarp();
    if (lane_index() == 0) shared.block_ring.fill(round);
    if (is_last) break;
    if (params.next_block) {  // drawn late, so that the last blocks go to whoever is free: when the block before is over
      shared.block_ring.wait_free(round + 3);
      if (lane_index() == 0) index = static_cast<int>(gridDim.x) + atomicAdd(params.next_block, 1);
      index = __shfl_sync(~0u, index, 0);
    } else {
      index += static_cast<int>(gridDim.x);
    }
  }
}

}  // namespace onnx_attn::forward_sm90_kernel
