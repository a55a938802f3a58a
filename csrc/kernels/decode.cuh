// decode.cuh: attention of a few query rows over many keys, which is a matter of reading the keys and values at full speed.
//
// Work comes in units: a chunk of keys of one (batch entry, kv head), for all query rows that share it. A block keeps to its
// SM and walks over every gridDim.x-th unit. The loaders run ahead over the tiles of all these units and fill a ring of stages
// in shared memory; while the computing warps read one or two of them, the others, 130 KB or more, are on their way. The
// preparer has the queries of the next unit ready. A computing warp takes 16 query rows and 16 keys at a time and has a running
// softmax of its own. Only the ring synchronises the warps, until they add up at the end of the unit.
//
// Every microsecond in which the computing warps do something else than read tiles lets the ring run full and the memory idle, so
// they are left nothing else. Measured on 32 sequences of 4096 keys (H200, 2026-11): with four of them, which also looked up their
// units and read the queries, 0.76 of the speed of a plain read; with eight and a preparer 0.87.
#pragma once

#include "decode_helpers.cuh"
#include "decode_merge.cuh"

namespace onnx_attn::decode {

template <class Element, int kHeadSize>
__device__ __forceinline__ void compute_units(const Job& job, const SharedMemory<kHeadSize>& shared) {
  using S = Stage<kHeadSize>;
  Control& control = *shared.control;
  const Role role(job.cut);
  const int first_key = role.group_in_team() * kTileRows, key_step = job.cut.team_groups * kTileRows;  // in a tile
  RowTile<Element, kHeadSize> rows;
  BlockMask mask(job.problem, job.rule, job.masks);
  RingPlace place, slot;

  for (;; slot.advance(kUnitSlots)) {
    const PreparedUnit& prepared = control.prepared[slot.index()];
    const Unit& unit = prepared.unit;
    slot.wait_full(control.units);
    if (!prepared.exists) return;
    if (unit.begin < unit.end) {
      rows.start(shared.staged_queries(slot.index()), role.row_tile, job.cut.row_tiles);
      mask.start_unit(prepared.rows + role.row_tile * kTileRows);

      HeldStages held;
      const int end = unit.end;
      for (int tile = first_tile<kHeadSize>(unit); tile < end; tile += S::kKeys, place.advance(job.stages)) {
        if ((tile / S::kKeys & (job.cut.teams - 1)) != role.team) {
          held.theirs = place.index();
          continue;
        }
        if (held.ours >= 0) arrive_as_warp(control.ring.empty[held.ours]);
        held.ours = place.index();
        place.wait_full(control.ring);
        const uint8_t* stage = shared.stage(place.index());
#pragma unroll 1
        for (int key = first_key; key < S::kKeys && tile + key < end; key += key_step) {
          Scores scores;
          uint32_t weights[4];
          rows.multiply_keys(scores, shared_address(stage) + key * 128);
          mask.apply(scores, stage + S::kBytes, tile, key);
          rows.update(scores, weights);
          rows.add_values(weights, shared_address(stage) + S::kValues + key * 128, end - tile - key);
        }
      }
      if (job.copies_past) device::barrier_wait(shared_address(&control.written[slot.index()]), slot.parity());
      merge_and_store(job, unit, role, shared, rows, held);
      if (held.ours >= 0) arrive_as_warp(control.ring.empty[held.ours]);
    } else {
      store_nothing<Element>(job, unit, role);
    }
    arrive_as_warp(control.units.empty[slot.index()]);
  }
}

template <class Element, int kHeadSize>
__global__ void __launch_bounds__(32 * (max_computing_warps(kHeadSize) + kHelpers), 1) decode_kernel(const __grid_constant__ Job job) {
  const SharedMemory<kHeadSize> shared(job);
  Control& control = *shared.control;
  const int computing_warps = job.cut.row_tiles * job.cut.key_groups;
  device::let_next_kernel_start();
  if (threadIdx.x == 0) {
    const int stage_readers = computing_warps / job.cut.teams + (job.copies_past ? 1 : 0);
    for (int i = 0; i < job.stages; ++i) control.ring.init(i, kLoaderArrivals * loaders(job.copies_past), stage_readers);
    for (int i = 0; i < kUnitSlots; ++i) {
      control.units.init(i, 1, computing_warps);
      device::barrier_init(shared_address(&control.written[i]), 1);
    }
  }
  // Nothing in global memory may be touched before the kernel before this one has ended. Without lengths that is only when
  // the first unit has been found.
  if (job.problem.mask.lengths.data) device::wait_for_previous_kernel();
  if (is_counted(job.problem)) control.table.fill(job.problem, job.cut);
  __syncthreads();

  const int helper = warp_index() - computing_warps;
  if (helper < 0) {
    compute_units<Element, kHeadSize>(job, shared);
  } else if (helper == 0) {
    prepare_units<Element, kHeadSize>(job, shared);
  } else if (helper == 1 && job.copies_past) {
    write_tiles<Element, kHeadSize>(job, shared);
  } else {
    const int others = kHelpers - loaders(job.copies_past);
    load_tiles<Element, kHeadSize>(job, shared, LoaderShare{helper - others, loaders(job.copies_past)});
  }
}

}  // namespace onnx_attn::decode
