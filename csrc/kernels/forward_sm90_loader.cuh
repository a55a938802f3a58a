// forward_sm90_loader.cuh: the warpgroup of the Hopper forward kernel that keeps Q, K and V coming. One thread loads K and V; another
// Q, apart from them, so that the next block's keys arrive while the output of this one is stored.
#pragma once

#include "forward_sm90_block.cuh"

namespace onnx_attn::forward_sm90_kernel {

template <int kRows, int kPanels>
__device__ __forceinline__ void load_panels(uint8_t* target, const CUtensorMap& map, int row, int head, int batch, uint32_t barrier,
                                            Keep keep) {
  barrier_arrive_expecting(barrier, kRows * kPanels * kPanelBytes);
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    bulk_load(shared_address(target) + panel * kRows * kPanelBytes, map, panel * 64, row, head, batch, barrier, keep);
  }
}

template <class Shape>
__device__ __forceinline__ void load_keys_and_values(SharedMemory<Shape>& shared, const ForwardParams& params) {
  int loaded = 0;  // key tiles since launch
  int round = 0;
#pragma unroll 1
  for (int index = blockIdx.x; index < params.blocks; ++round) {
    int next = index + static_cast<int>(gridDim.x);
    if (params.next_block) next = static_cast<int>(gridDim.x) + atomicAdd(params.next_block, 1);  // asked for early, needed late

    const RowBlock<Shape> block(params, index);
    const Work& work = block.work;
    const int tiles = block.tiles.end - block.tiles.begin;
#pragma unroll 1
    for (int i = 0; i <= tiles; ++i, ++loaded) {  // K of a tile, then V of the one before: the order in which they are used
      if (i < tiles) {
        shared.key_ring.wait_free(loaded);
        load_panels<Shape::kKeys, Shape::kKeyPanels>(shared.keys[shared.key_ring.stage(loaded)], params.maps.k,
                                                     (block.tiles.end - 1 - i) * Shape::kKeys, work.kv_head, work.batch,
                                                     shared.key_ring.full_barrier(loaded), Keep::long_);
      }
      if (i > 0) {
        shared.value_ring.wait_free(loaded - 1);
        load_panels<Shape::kKeys, Shape::kValuePanels>(shared.values[shared.value_ring.stage(loaded - 1)], params.maps.v,
                                                       (block.tiles.end - i) * Shape::kKeys, work.kv_head, work.batch,
                                                       shared.value_ring.full_barrier(loaded - 1), Keep::long_);
      }
    }
    --loaded;  // the last turn loaded no K

    if (params.next_block) {
      shared.block_ring.wait_free(round);
      *const_cast<volatile int*>(&shared.next_block[round % 2]) = next;
      barrier_arrive(shared.block_ring.full_barrier(round));
    }
    index = next;
  }
}

template <class Shape>
__device__ __forceinline__ void load_queries(SharedMemory<Shape>& shared, const ForwardParams& params) {
  int round = 0;
#pragma unroll 1
  for (int index = blockIdx.x; index < params.blocks; ++round) {
    const RowBlock<Shape> block(params, index);
    shared.query_ring.wait_free(round);
    load_panels<Shape::kRows, Shape::kKeyPanels>(shared.queries[shared.query_ring.stage(round)], params.maps.q, block.work.first_row,
                                                 block.work.q_head, block.work.batch, shared.query_ring.full_barrier(round), Keep::briefly);
    index = following_block(shared, params, index, round);
    if (params.next_block) shared.block_ring.release(round);
  }
}

}  // namespace onnx_attn::forward_sm90_kernel
