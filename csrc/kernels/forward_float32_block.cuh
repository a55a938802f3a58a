// forward_float32_block.cuh: what a thread block of the float32 forward kernel is made of: tile sizes, plan, shared memory, loads.
#pragma once

#include "../device/block_work.cuh"
#include "../device/split.cuh"
#include "forward_float32_params.h"

namespace onnx_attn::forward_float32_kernel {

using namespace device;

// kRowTiles: 16-row tiles of a warp. Two of them halve the shared memory reads per product.
template <int kHeadSize_, int kRowTiles_, int kKeys_, int kBlocks_ = 2>
struct TileShape {
  static constexpr int kHeadSize = kHeadSize_;  // of K and of V
  static constexpr int kRowTiles = kRowTiles_;
  static constexpr int kKeys = kKeys_;
  static constexpr int kBlocksPerMultiprocessor = kBlocks_;
  static constexpr int kThreads = 128;
  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kRows = kWarpRows * kThreads / 32;
  static_assert(split::kRowGranule % kKeys == 0);
};

enum Part { kHigh, kLow, kParts };

struct Rows {  // of one head
  const __half* halves;
  const float* factors;
};

// In shared memory, where it costs no registers.
template <class Shape>
struct BlockPlan : BlockWork {
  Rows k, v;
  float softcap;
  Mask mask;
  MaskTilePlan mask_tile;
  bool has_mask_tile;  // there is a tensor mask or padding

  __device__ __forceinline__ void copy(const ForwardParams& params) {
    mask = params.problem.mask;
    mask_tile = params.mask_tile;
    has_mask_tile = !mask_tile.is_empty();
    softcap = params.softcap;
  }
  __device__ __forceinline__ void place(const ForwardParams& params) {
    const Problem& problem = params.problem;
    BlockWork::place<Shape>(problem, params.order);
    const int64_t row = (work.batch * problem.kv_heads + work.kv_head) * params.k.rows;
    k = {params.k.halves + row * kParts * Shape::kHeadSize, params.k.factors + row};
    v = {params.v.halves + row * kParts * Shape::kHeadSize, params.v.factors + row};
  }
};

template <class Shape>
struct SharedMemory {
  using QueryTile = SwizzledTile<Shape::kRows, Shape::kHeadSize>;
  using KeyTile = SwizzledTile<Shape::kKeys, Shape::kHeadSize>;

  alignas(128) uint8_t queries[kParts][QueryTile::kBytes];
  uint8_t keys[kParts][KeyTile::kBytes];
  uint8_t values[kParts][KeyTile::kBytes];
  alignas(16) float key_factors[Shape::kKeys];
  alignas(16) float value_factors[Shape::kKeys];
  alignas(16) float key_padding[Shape::kKeys];
  float query_factors[Shape::kRows];  // times the scale
  alignas(16) BlockPlan<Shape> plan;
  // followed by the mask tile
};

// The warp's own rows of Q.
template <class Shape>
__device__ __forceinline__ void load_queries(SharedMemory<Shape>& shared, const ForwardParams& params, int warp_row) {
  using Tile = typename SharedMemory<Shape>::QueryTile;
  const Problem& problem = params.problem;
  const Work& work = shared.plan.work;
  const int columns = static_cast<int>(problem.head_size);
  const float* q = head_rows<const float>(problem.q, work.batch, work.q_head);
  const float* bias = problem.q_bias ? static_cast<const float*>(problem.q_bias) + work.q_head * problem.head_size : nullptr;
  split_queries<Shape::kWarpRows, Shape::kHeadSize / 64>(problem, q, bias, columns, work.first_row, shared.plan.end_row, warp_row,
                                                         [&](int row, int column, const SplitPair& pair, float factor) {
                                                           const uint32_t at = Tile::offset(row, column / 8) + column % 8 * 2;
                                                           *reinterpret_cast<uint32_t*>(shared.queries[kHigh] + at) = pair.high;
                                                           *reinterpret_cast<uint32_t*>(shared.queries[kLow] + at) = pair.low;
                                                           if (column == 0) shared.query_factors[row] = factor * params.scale;
                                                         });
}

// Starts copying a tile of K or V. Rows past the last visible key may hold NaN, and 0 * NaN is NaN: they become zeros.
template <class Shape>
__device__ __forceinline__ void load_rows(uint8_t (&target)[kParts][SharedMemory<Shape>::KeyTile::kBytes], float* factors,
                                          const Rows& source, int tile, int key_end) {
  const int first_key = tile * Shape::kKeys;
  const __half* rows = source.halves + int64_t{first_key} * kParts * Shape::kHeadSize;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    load_tile_async<Shape::kKeys, Shape::kHeadSize, Shape::kThreads>(shared_address(target[part]), rows + part * Shape::kHeadSize,
                                                                     kParts * Shape::kHeadSize, key_end - first_key, Shape::kHeadSize / 8);
  }
  if (threadIdx.x < Shape::kKeys / 4)
    copy_async_16(shared_address(factors + 4 * threadIdx.x), source.factors + first_key + 4 * threadIdx.x, 16);
  copy_async_commit();
}

}  // namespace onnx_attn::forward_float32_kernel
