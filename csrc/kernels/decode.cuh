// decode.cuh: attention of a few query rows over many keys, which is a matter of reading the keys and values at full speed.
//
// Work comes in units: a chunk of keys of one (batch entry, kv head), for all query rows that share it. A block keeps to its
// SM and walks over every gridDim.x-th unit. One warp, the loader, runs ahead over the tiles of all these units and fills a
// ring of stages in shared memory; while the computing warps read one or two of them, the others, 130 KB or more, are on their
// way. Another, the preparer, has the queries of the next unit ready. A computing warp takes 16 query rows and 16 keys at a
// time and has a running softmax of its own. Only the ring synchronises the warps, until they add up at the end of the unit.
//
// Measured (H200, 2026-11): with four computing warps, which also looked up their units and read the queries, arithmetic and
// its latencies took as long as the loads, and longer with any mask: 0.76 of the speed of a plain read.
#pragma once

#include "decode_helpers.cuh"
#include "decode_merge.cuh"

namespace onnx_attn::decode {

template <class Element, int kHeadSize>
__device__ __forceinline__ void compute_units(const Job& job, const SharedMemory<kHeadSize>& shared) {
  using S = Stage<kHeadSize>;
  Control& control = *shared.control;
  const Role role(job.cut);
  const int first_key = role.group_in_team() * kTileRows, key_step = role.team_groups * kTileRows;  // in a tile
  const int next_key = job.cut.key_groups * kTileRows;  // from any block to the warp's next, in this tile or a later one
  RowTile<Element, kHeadSize> rows;
  BlockMask mask(job.problem, job.rule);
  RingPlace place, slot;

  for (;; slot.advance(kUnitSlots)) {
    const PreparedUnit& prepared = control.prepared[slot.index];
    const Unit& unit = prepared.unit;
    slot.wait_full(control.units);
    if (!prepared.exists) return;
    if (unit.begin < unit.end) {
      rows.start(shared.staged_queries(slot.index), role.row_tile, job.cut.row_tiles);
      mask.start_unit(prepared.rows + role.row_tile * kTileRows);

      int held_stage = -1;
      const int end = unit.end;
      int tile = first_tile<kHeadSize>(unit);
      const auto is_ours = [&](int tile) { return (tile / S::kKeys & (job.cut.teams - 1)) == role.team; };
      const int first_block = (is_ours(tile) ? tile : tile + S::kKeys) + first_key;
      mask.prefetch_tensor(first_block);
      mask.read_padding(first_block);
      for (; tile < end; tile += S::kKeys, place.advance(job.stages)) {
        if (!is_ours(tile)) continue;
        if (held_stage >= 0) arrive_as_warp(control.ring.empty[held_stage]);
        held_stage = place.index;
        const uint32_t stage = shared.stage(place.index);
        place.wait_full(control.ring);
#pragma unroll 1
        for (int key = first_key; key < S::kKeys && tile + key < end; key += key_step) {
          Scores scores;
          uint32_t weights[4];
          rows.multiply_keys(scores, stage + key * 128);
          mask.apply(scores, tile + key);
          mask.prefetch_tensor(tile + key + next_key);
          rows.update(scores, weights);
          rows.add_values(weights, stage + S::kValues + key * 128, end - tile - key);
          mask.read_padding(tile + key + next_key);
        }
      }
      if (job.copies_past) device::barrier_wait(shared_address(&control.written[slot.index]), slot.parity);
      merge_and_store(job, unit, role, shared, rows, held_stage);
      if (held_stage >= 0) arrive_as_warp(control.ring.empty[held_stage]);
    } else {
      store_nothing<Element>(job, unit, role);
    }
    arrive_as_warp(control.units.empty[slot.index]);
  }
}

template <class Element, int kHeadSize, bool kInBulk>
__global__ void __launch_bounds__(32 * (max_computing_warps(kHeadSize) + kHelpers), 1)
    decode_kernel(const __grid_constant__ Job job, const __grid_constant__ TensorMaps maps) {
  if constexpr (!kInBulk || device::kHasBulkCopies) {
    const SharedMemory<kHeadSize> shared(job);
    Control& control = *shared.control;
    const int computing_warps = job.cut.row_tiles * job.cut.key_groups;
    const LoaderShare share{warp_index() - computing_warps - (kHelpers - loaders(job.copies_past)), kInBulk ? 1 : loaders(job.copies_past)};
    device::let_next_kernel_start();
    if (threadIdx.x == 0) {
      if constexpr (kInBulk) {
        device::prefetch_map(maps.keys);
        device::prefetch_map(maps.values);
      }
      const int stage_readers = computing_warps / job.cut.teams + (job.copies_past ? 1 : 0);
      for (int i = 0; i < job.stages; ++i) control.ring.init(i, full_arrivals(kInBulk, share.loaders), stage_readers);
      for (int i = 0; i < kUnitSlots; ++i) {
        control.units.init(i, 1, computing_warps);
        device::barrier_init(shared_address(&control.written[i]), 1);
      }
      device::publish_barriers_to_copies();
    }
    // Nothing in global memory may be touched before the kernel before this one has ended. Without lengths that is only when
    // the first unit has been found.
    if (job.problem.mask.lengths.data) device::wait_for_previous_kernel();
    if (is_counted(job.problem)) control.table.fill(job.problem, job.cut);
    __syncthreads();
    const int helper = warp_index() - computing_warps;
    if (helper < 0)
      compute_units<Element, kHeadSize>(job, shared);
    else if (helper == 0)
      prepare_units<Element, kHeadSize>(job, shared);
    else if (helper == 1 && job.copies_past)
      write_tiles<Element, kHeadSize>(job, shared);
    else if (share.loader < share.loaders)
      load_tiles<Element, kHeadSize, kInBulk>(job, maps, shared, share);
  }
}

}  // namespace onnx_attn::decode
