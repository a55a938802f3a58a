// scores_block.cuh: what a thread block of the scores kernel is made of: plan, shared memory, and the loads of Q and K.
#pragma once

#include <climits>
#include <type_traits>

#include "../device/split.cuh"
#include "../device/work.cuh"
#include "scores_params.h"

namespace onnx_attn::scores_kernel {

using namespace device;

// kUsesWarpgroups: Hopper's products, which read both operands from shared memory, instead of a warp's.
template <class Element_, bool kUsesWarpgroups_>
struct Shape {
  using Element = Element_;
  static constexpr bool kUsesWarpgroups = kUsesWarpgroups_;
  static constexpr bool kIsSplit = std::is_same_v<Element, float>;
  using Operand = std::conditional_t<kIsSplit, __half, Element>;
  static constexpr DType kType = kIsSplit ? DType::f32 : std::is_same_v<Element, __half> ? DType::f16 : DType::bf16;
  static constexpr int kParts = parts(kType);
  static constexpr int kRowTiles = row_tiles(kType);
  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kRows = rows(kType);
  static constexpr int kStages = stages(kType);
  static constexpr int kOutputPitch = output_pitch(kType);
  static constexpr int kBlocksPerMultiprocessor = kIsSplit ? 2 : 3;

  // Where a row of the block lies in shared memory. A warp owns kWarpRows neighbours, but a warpgroup's product gives each of
  // its warps 16 rows of 64: with two of them the 16-row tiles trade places.
  __device__ static __forceinline__ int stored_row(int row) {
    return kUsesWarpgroups && kRowTiles == 2 ? row / 16 % 2 * 64 + row / 32 * 16 + row % 16 : row;
  }
};

// What the threads of a block agree on.
struct BlockPlan {
  int64_t batch, q_head, kv_head;
  int first_row, end_row;
  RowPosition position;
  int readable_begin, readable_end;  // keys that are multiplied; scores of the others are known without
  TileRange visible;                 // with keys that some row can see
  int first_tile, end_tile;
  bool has_mask_tile;
  bool needs_statistics;
  Mask mask;
  MaskTilePlan mask_tile;

  __device__ __forceinline__ void place(const ScoresParams& params, int block_rows) {
    const Problem& problem = params.problem;
    const int64_t span = blockIdx.x % params.spans, row_block = blockIdx.x / params.spans % params.row_blocks;
    const int64_t head = blockIdx.x / params.spans / params.row_blocks;
    batch = head / problem.q_heads;
    q_head = head % problem.q_heads;
    kv_head = q_head / (problem.q_heads / problem.kv_heads);
    first_row = static_cast<int>(row_block) * block_rows;
    end_row = static_cast<int>(min(int64_t{first_row} + block_rows, problem.q_len));
    first_tile = static_cast<int>(span) * params.span_tiles;
    end_tile = static_cast<int>(min(int64_t{first_tile} + params.span_tiles, (problem.kv_len + kKeys - 1) / kKeys));

    position = row_position(problem.mask, batch, problem.q_len, problem.kv_len);
    mask = problem.mask;
    if (params.adds_causal_bias) mask.right = -1;
    const KeyRange keys = visible_keys(mask, position, first_row, end_row);
    visible = tile_range<kKeys>(mask, position, keys, first_row, end_row);
    // The first two modes are defined at every cell; the others must not touch what lies past the length.
    const bool is_masked = problem.score_mode != ScoreMode::raw && problem.score_mode != ScoreMode::capped;
    readable_begin = is_masked ? static_cast<int>(keys.begin) : 0;
    readable_end = static_cast<int>(is_masked ? max(keys.begin, keys.end) : problem.kv_len);
    mask_tile = params.mask_tile;
    has_mask_tile = is_masked && !mask_tile.is_empty();
    needs_statistics = false;
  }
};

// The fixed part of shared memory; the rows of Q and the mask tile follow.
template <class Shape>
struct SharedMemory {
  using QueryTile = SwizzledTile<Shape::kRows, kDepth>;
  using KeyTile = SwizzledTile<kKeys, kDepth>;

  alignas(1024) uint8_t keys[Shape::kStages][Shape::kParts][KeyTile::kBytes];
  alignas(128) uint8_t output[output_bytes(Shape::kType)];
  alignas(16) float key_padding[kKeys];
  float query_factors[Shape::kRows];
  BlockPlan plan;

  __device__ __forceinline__ uint8_t* queries() { return reinterpret_cast<uint8_t*>(this) + sizeof(*this); }
  __device__ __forceinline__ uint8_t* mask_tile(int depth_chunks) { return queries() + depth_chunks * Shape::kParts * QueryTile::kBytes; }
};

// float32: the warp's own rows, split.
template <class Shape>
__device__ __forceinline__ void load_split_queries(SharedMemory<Shape>& shared, const ScoresParams& params, int warp_row) {
  using Tile = typename SharedMemory<Shape>::QueryTile;
  const Problem& problem = params.problem;
  const BlockPlan& plan = shared.plan;
  const int columns = static_cast<int>(problem.head_size);
  const float* q = static_cast<const float*>(problem.q.data) + plan.batch * problem.q.batch_stride + plan.q_head * problem.q.head_stride;
  const float* bias = problem.q_bias ? static_cast<const float*>(problem.q_bias) + plan.q_head * problem.head_size : nullptr;
  split_queries<Shape::kWarpRows, split::kMaxColumns / 64>(problem, q, bias, columns, plan.first_row, plan.end_row, warp_row,
                                                           [&](int row, int column, const SplitPair& pair, float factor) {
                                                             const int chunk = column / kDepth;
                                                             if (chunk >= params.depth_chunks) return;
                                                             uint8_t* parts = shared.queries() + chunk * Shape::kParts * Tile::kBytes;
                                                             const uint32_t at = Tile::offset(row, column % kDepth / 8) + column % 8 * 2;
                                                             *reinterpret_cast<uint32_t*>(parts + at) = pair.high;
                                                             *reinterpret_cast<uint32_t*>(parts + Tile::kBytes + at) = pair.low;
                                                             if (column == 0) shared.query_factors[row] = factor * params.scale;
                                                           });
}

// 16-bit types. With a projection bias it is added, rounded once, and the copy is not asynchronous.
template <class Shape>
__device__ __forceinline__ void copy_queries(SharedMemory<Shape>& shared, const ScoresParams& params) {
  using Element = typename Shape::Element;
  using Tile = typename SharedMemory<Shape>::QueryTile;
  const Problem& problem = params.problem;
  const BlockPlan& plan = shared.plan;
  const Element* q = static_cast<const Element*>(problem.q.data) + plan.batch * problem.q.batch_stride +
                     plan.q_head * problem.q.head_stride + plan.first_row * problem.q.row_stride;
  const int rows = plan.end_row - plan.first_row, chunks = static_cast<int>(problem.head_size / 8);
  if (!problem.q_bias) {
    for (int depth = 0; depth < params.depth_chunks; ++depth) {
      const uint32_t tile = shared_address(shared.queries() + depth * Tile::kBytes);
#pragma unroll
      for (int row = 0; row < Shape::kRows; row += 16) {
        load_tile_async<16, kDepth, kThreads>(tile + Shape::stored_row(row) * Tile::kPitch, q + row * problem.q.row_stride + depth * kDepth,
                                              problem.q.row_stride, rows - row, chunks - depth * (kDepth / 8));
      }
    }
    copy_async_commit();
    return;
  }
  const Element* bias = static_cast<const Element*>(problem.q_bias) + plan.q_head * problem.head_size;
  const int row_chunks = params.depth_chunks * Tile::kChunks;
#pragma unroll 1
  for (int index = threadIdx.x; index < Shape::kRows * row_chunks; index += kThreads) {
    const int row = index / row_chunks, chunk = index % row_chunks;
    uint32_t sums[4] = {};
    if (row < rows && chunk < chunks) {
      const uint4 query = *reinterpret_cast<const uint4*>(q + row * problem.q.row_stride + chunk * 8);
      const uint32_t pairs[4] = {query.x, query.y, query.z, query.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = unpack<Element>(pairs[i]);
        const Element* b = bias + chunk * 8 + 2 * i;
        sums[i] = pack<Element>(x.x + convert<float>(b[0]), x.y + convert<float>(b[1]));
      }
    }
    uint8_t* tile = shared.queries() + chunk / Tile::kChunks * Tile::kBytes;
    *reinterpret_cast<uint4*>(tile + Tile::offset(Shape::stored_row(row), chunk % Tile::kChunks)) =
        make_uint4(sums[0], sums[1], sums[2], sums[3]);
  }
}

// The tiles of K that a walk over keys needs, chunk by chunk, requested kStages - 1 chunks ahead.
template <class Shape>
struct KeyStream {
  using Tile = typename SharedMemory<Shape>::KeyTile;

  int tile, end_tile;  // of the next request
  int chunk = 0, stage = 0;

  __device__ __forceinline__ void request(SharedMemory<Shape>& shared, const ScoresParams& params) {
    if (tile < end_tile) {
      const Problem& problem = params.problem;
      const BlockPlan& plan = shared.plan;
      const int first_key = tile * kKeys, keys = plan.readable_end - first_key;
      if constexpr (Shape::kIsSplit) {
        const split::SplitTensor& k = params.split_k;
        const int64_t row = (plan.batch * problem.kv_heads + plan.kv_head) * k.rows + first_key;
        const __half* source = k.halves + row * 2 * k.columns + chunk * kDepth;
#pragma unroll
        for (int part = 0; part < Shape::kParts; ++part) {
          load_tile_async<kKeys, kDepth, kThreads>(shared_address(shared.keys[stage][part]), source + part * k.columns, 2 * k.columns, keys,
                                                   kDepth / 8);
        }
      } else {
        using Element = typename Shape::Element;
        const Element* source = static_cast<const Element*>(problem.k.data) + plan.batch * problem.k.batch_stride +
                                plan.kv_head * problem.k.head_stride + first_key * problem.k.row_stride + chunk * kDepth;
        load_tile_async<kKeys, kDepth, kThreads>(shared_address(shared.keys[stage][0]), source, problem.k.row_stride, keys,
                                                 static_cast<int>(problem.head_size / 8) - chunk * (kDepth / 8));
      }
      if (++chunk == params.depth_chunks) {
        chunk = 0;
        ++tile;
      }
      stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
    }
    copy_async_commit();
  }
};

}  // namespace onnx_attn::scores_kernel
