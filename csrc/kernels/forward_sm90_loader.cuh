// forward_sm90_loader.cuh: the threads of the Hopper forward kernel that move tiles between global and shared memory: one for K and V; one
// for Q and for the output, which leaves through Q's place; one for tiles of a tensor mask.
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
#pragma unroll 1
  for (int round = 0;; ++round) {
    shared.block_ring.wait_full(round);
    const RowBlock<Shape>& block = shared.blocks[shared.block_ring.stage(round)];
    if (block.first_row == RowBlock<Shape>::kNoRow) return;
    const int kv_head = block.kv_head, batch = block.batch, end = block.tiles.end, tiles = end - block.tiles.begin;
    shared.block_ring.release(round);
#pragma unroll 1
    for (int i = 0; i <= tiles; ++i, ++loaded) {  // K of a tile, then V of the one before: the order in which they are used
      if (i < tiles) {
        shared.key_ring.wait_free(loaded);
        load_panels<Shape::kKeys, Shape::kKeyPanels>(shared.keys[shared.key_ring.stage(loaded)], params.maps.k,
                                                     (end - 1 - i) * Shape::kKeys, kv_head, batch, shared.key_ring.full_barrier(loaded),
                                                     Keep::long_);
      }
      if (i > 0) {
        shared.value_ring.wait_free(loaded - 1);
        load_panels<Shape::kKeys, Shape::kValuePanels>(shared.values[shared.value_ring.stage(loaded - 1)], params.maps.v,
                                                       (end - i) * Shape::kKeys, kv_head, batch, shared.value_ring.full_barrier(loaded - 1),
                                                       Keep::long_);
      }
    }
    --loaded;  // the last turn loaded no K
  }
}

template <class Shape>
__device__ __forceinline__ void store_output(SharedMemory<Shape>& shared, const ForwardParams& params, int round) {
  const int stage = shared.query_ring.stage(round);
  barrier_wait(shared_address(&shared.output_full[stage]), shared.query_ring.round(round));
  const auto& place = shared.output_place[stage];
#pragma unroll
  for (int panel = 0; panel < Shape::kValuePanels; ++panel) {
    bulk_store(shared_address(shared.queries[stage]) + panel * Shape::kRows * kPanelBytes, params.maps.y, panel * 64, place.row, place.head,
               place.batch);
  }
  bulk_store_commit();
}

template <class Shape>
__device__ __forceinline__ void load_queries_and_store_output(SharedMemory<Shape>& shared, const ForwardParams& params) {
  int round = 0;
#pragma unroll 1
  for (;; ++round) {
    shared.block_ring.wait_full(round);
    const RowBlock<Shape>& block = shared.blocks[shared.block_ring.stage(round)];
    if (block.first_row == RowBlock<Shape>::kNoRow) break;
    if (round >= Shape::kQueryStages) {
      store_output(shared, params, round - Shape::kQueryStages);
      bulk_store_wait_read();
    }
    const int stage = shared.query_ring.stage(round);
    shared.output_place[stage] = {block.first_row, block.q_head, block.batch};
    load_panels<Shape::kRows, Shape::kKeyPanels>(shared.queries[stage], params.maps.q, block.first_row, block.q_head, block.batch,
                                                 shared.query_ring.full_barrier(round), Keep::briefly);
    shared.block_ring.release(round);
  }
#pragma unroll 1
  for (int left = max(0, round - Shape::kQueryStages); left < round; ++left) store_output(shared, params, left);
  bulk_store_wait();  // shared memory must outlive the stores
}

template <class Shape, ScoreWork kScoreWork>
__device__ __forceinline__ void load_mask_tiles(SharedMemory<Shape>& shared, const ForwardParams& params) {
  const MaskTiles& mask = params.mask;
  const MaskLayout layout = mask_layout<Shape, kScoreWork>(params);
  const MaskRing<Shape> ring(shared, layout);
  const int bytes = (mask.is_key_row ? 1 : Shape::kRows) * layout.row_bytes() * layout.panels();
  int loaded = 0;
#pragma unroll 1
  for (int round = 0;; ++round) {
    shared.block_ring.wait_full(round);
    const RowBlock<Shape>& block = shared.blocks[shared.block_ring.stage(round)];
    if (block.first_row == RowBlock<Shape>::kNoRow) return;
    const int row = mask.is_key_row ? 0 : block.first_row, head = mask.by_head ? block.q_head : 0, batch = mask.by_batch ? block.batch : 0;
    const int begin = block.tiles.begin, end = block.has_mask_tiles ? block.tiles.end : begin;
    shared.block_ring.release(round);
#pragma unroll 1
    for (int tile = end - 1; tile >= begin; --tile, ++loaded) {
      ring.wait_free(loaded);
      barrier_arrive_expecting(ring.full_barrier(loaded), bytes);
#pragma unroll 1
      for (int panel = 0; panel < layout.panels(); ++panel) {
        bulk_load(ring.tile(loaded) + panel * layout.panel_bytes(), params.maps.mask, tile * Shape::kKeys + panel * layout.panel_keys(),
                  row, head, batch, ring.full_barrier(loaded), Keep::long_);
      }
    }
  }
}

}  // namespace onnx_attn::forward_sm90_kernel
