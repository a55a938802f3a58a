// forward_sm80_block.cuh: what a thread block of the portable forward kernel is made of: tile sizes, plan, shared memory, Q.
#pragma once

#include "../device/block_work.cuh"
#include "forward_sm80_params.h"

namespace onnx_attn::forward_sm80_kernel {

using namespace device;

// kRowTiles: 16-row tiles of a warp. Two of them halve the shared memory reads per product, but O takes
// kRowTiles * kHeadSize / 2 registers, so head sizes above 128 have one.
template <int kHeadSize_, int kRowTiles_, int kKeys_, bool kQueriesInRegisters_>
struct TileShape {
  static constexpr int kHeadSize = kHeadSize_;
  static constexpr int kRowTiles = kRowTiles_;
  static constexpr int kKeys = kKeys_;
  static constexpr bool kQueriesInRegisters = kQueriesInRegisters_;
  static constexpr int kBlocksPerMultiprocessor = 2;
  static constexpr int kThreads = 128;
  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kRows = kWarpRows * kThreads / 32;
};

template <class Element>
struct Rows {  // of one head
  const Element* first;
  int64_t stride;
  int chunks;  // of 8 elements
};

// What the threads of a block agree on. It lies in shared memory because registers are full during the main loop: read from
// parameters, the compiler would keep all of it in registers, and spill the softmax.
template <class Element, class Shape>
struct BlockPlan : BlockWork {
  Rows<Element> k, v;
  Mask mask;
  MaskTilePlan mask_tile;
  ScoreTransform transform;

  __device__ __forceinline__ void copy(const ForwardParams& params) {
    mask = params.problem.mask;
    mask_tile = params.mask_tile;
    transform = params.transform;
  }
  __device__ __forceinline__ void place(const ForwardParams& params) {
    const Problem& problem = params.problem;
    BlockWork::place<Shape>(problem, params.order);
    k = {head_rows<const Element>(problem.k, work.batch, work.kv_head), problem.k.row_stride, static_cast<int>(problem.head_size / 8)};
    v = {head_rows<const Element>(problem.v, work.batch, work.kv_head), problem.v.row_stride, static_cast<int>(problem.v_head_size / 8)};
  }
};

template <class Element, class Shape>
struct SharedMemory {
  using QueryTile = SwizzledTile<Shape::kRows, Shape::kHeadSize>;  // holds the output rows at the end
  using KeyTile = SwizzledTile<Shape::kKeys, Shape::kHeadSize>;

  alignas(128) uint8_t queries[QueryTile::kBytes];
  uint8_t keys[KeyTile::kBytes];
  uint8_t values[KeyTile::kBytes];
  alignas(16) float key_padding[Shape::kKeys];
  alignas(16) BlockPlan<Element, Shape> plan;
  // followed by the mask tile

  __device__ __forceinline__ uint32_t warp_queries() {
    return shared_address(queries) + threadIdx.x / 32 * Shape::kWarpRows * QueryTile::kPitch;
  }
};

// The block's rows of Q; with a projection bias it is added, rounded once, and the copy is not asynchronous.
template <class Element, class Shape>
__device__ __forceinline__ void load_queries(SharedMemory<Element, Shape>& shared, const Problem& problem) {
  using Tile = typename SharedMemory<Element, Shape>::QueryTile;
  const Work& work = shared.plan.work;
  const int rows = shared.plan.end_row - work.first_row, chunks = static_cast<int>(problem.head_size / 8);
  const Element* q = head_rows<const Element>(problem.q, work.batch, work.q_head) + work.first_row * problem.q.row_stride;
  if (!problem.q_bias) {
    load_tile_async<Shape::kRows, Shape::kHeadSize, Shape::kThreads>(shared_address(shared.queries), q, problem.q.row_stride, rows, chunks);
    copy_async_commit();
    return;
  }
  const Element* bias = static_cast<const Element*>(problem.q_bias) + work.q_head * problem.head_size;
#pragma unroll 1
  for (int index = threadIdx.x; index < Shape::kRows * Tile::kChunks; index += Shape::kThreads) {
    const int row = index / Tile::kChunks, chunk = index % Tile::kChunks;
    uint4 sum = make_uint4(0, 0, 0, 0);
    if (row < rows && chunk < chunks) {
      const uint4 query = *reinterpret_cast<const uint4*>(q + row * problem.q.row_stride + chunk * 8);
      const Element* b = bias + chunk * 8;
      const auto add = [&](uint32_t pair, int at) {
        const float2 x = unpack<Element>(pair);
        return pack<Element>(x.x + convert<float>(b[at]), x.y + convert<float>(b[at + 1]));
      };
      sum = make_uint4(add(query.x, 0), add(query.y, 2), add(query.z, 4), add(query.w, 6));
    }
    *reinterpret_cast<uint4*>(shared.queries + Tile::offset(row, chunk)) = sum;
  }
}

}  // namespace onnx_attn::forward_sm80_kernel
