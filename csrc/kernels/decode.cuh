// decode.cuh: attention of a few query rows over many keys, which is a matter of reading the keys and values at full speed.
//
// Work comes in units: a chunk of keys of one (batch entry, kv head), for all query rows that share it. A block keeps to its SM and
// walks over its share of the units, and then over what it is dealt. The loaders run ahead over the tiles of all these units and fill
// a ring of stages in shared memory; while the computing warps read one or two of them, the others, 130 KB or more, are on their way.
// The preparer has the queries of the next unit ready. A computing warp takes 8 or 16 query rows and 16 keys at a time and has a
// running softmax of its own. Only the ring synchronises the warps, until they add up at the end of the unit.
//
// Every microsecond in which the computing warps do something else than read tiles lets the ring run full and the memory idle, so
// they are left nothing else. 32 sequences of 4096 keys are read at 0.95 of the speed of a plain read, and at 0.97 without the
// arithmetic (H200, 2026-11).
#pragma once

#include "decode_helpers.cuh"
#include "decode_merge.cuh"

namespace onnx_attn::decode {

template <class Element, int kHeadSize, int kRowEights>
__device__ __forceinline__ void compute_units(const Job& job, const SharedMemory<kHeadSize>& shared) {
  using S = Stage<kHeadSize>;
  Control& control = *shared.control;
  const Role role(job.cut);
  const int first_key = role.group_in_team() * 16, key_step = 16 << job.cut.team_shift;  // in a tile
  RowTile<Element, kHeadSize, kRowEights> rows;
  BlockMask<kRowEights> mask(job.problem, job.rule, job.masks);
  RowSum<RowTile<Element, kHeadSize, kRowEights>::kMayAddUp> sum;
  RingPlace place, slot;

  for (;; slot.advance(kUnitSlots)) {
    const PreparedUnit& prepared = control.prepared[slot.index()];
    const Unit& unit = prepared.unit;
    slot.wait_full(control.units);
    if (!prepared.exists) break;
    if (unit.begin < unit.end) {
      rows.start(shared.staged_queries(slot.index()), role.row_tile, job.cut.block_rows());
      mask.start_unit(prepared.rows + role.row_tile * 8 * kRowEights, prepared.whole);

      const int begin = first_tile<kHeadSize>(unit), end = unit.end;
      for (int tile = begin; tile < end; tile += S::kKeys, place.advance(job.stages)) {
        if ((tile / S::kKeys & (job.cut.teams - 1)) != role.team) continue;
        place.wait_full(control.ring);
        const uint8_t* stage = shared.stage(place.index());
#pragma unroll 1
        for (int key = first_key; key < S::kKeys && tile + key < end; key += key_step) {
          Scores<kRowEights> scores;
          uint32_t weights[kRowEights][2];
          rows.multiply_keys(scores, shared_address(stage) + key * 128);
          mask.apply(scores, stage + S::kBytes, tile, key);
          rows.update(scores, weights);
          rows.add_values(weights, shared_address(stage) + S::kValues + key * 128, end - tile - key);
        }
        const bool is_last = tile + job.cut.teams * S::kKeys >= end;  // of the team: it keeps the stage for its results
        if (!is_last) arrive_as_warp(control.ring.empty[place.index()]);
      }
      if (job.copies_past) device::barrier_wait(shared_address(&control.written[slot.index()]), slot.parity());
      const HeldStages held{(end - 1) / S::kKeys, (end - 1) / S::kKeys - begin / S::kKeys + 1, place.index(), job.stages};
      merge_and_store(job, unit, role, shared, rows, held, sum);
      const int own_stage = held.of(role.team, job.cut.teams);
      if (own_stage >= 0) arrive_as_warp(control.ring.empty[own_stage]);
    } else {
      store_nothing<Element>(job, unit, role, sum);
    }
    if (threadIdx.x == 0 && job.part_counts && unit.ends_run() && !unit.has_whole_line()) {
      control.shared_lines[control.shared_line_count++] = unit;
    }
    arrive_as_warp(control.units.empty[slot.index()]);
  }
  if (job.part_counts) add_up_shared_lines<Element>(job, role, control);
}

template <class Element, int kHeadSize, int kRowEights>
__global__ void __launch_bounds__(kBlockThreads, 1) decode_kernel(const __grid_constant__ Job job) {
  const SharedMemory<kHeadSize> shared(job);
  Control& control = *shared.control;
  device::let_next_kernel_start();
  if (threadIdx.x == 0) {
    control.shared_line_count = 0;
    const int stage_readers = kComputingWarps / job.cut.teams + (job.copies_past ? 1 : 0);
    for (int i = 0; i < job.stages; ++i) control.ring.init(i, kLoaderArrivals * loaders(job.copies_past), stage_readers);
    for (int i = 0; i < kUnitSlots; ++i) {
      control.units.init(i, 1, kComputingWarps);
      device::barrier_init(shared_address(&control.written[i]), 1);
    }
    const int ticket_readers = loaders(job.copies_past);  // one fewer, and the preparer
    for (int i = 0; i < kTicketSlots; ++i) control.ticket_ring.init(i, 1, ticket_readers);
  }
  // Nothing in global memory may be touched before the kernel before this one has ended. Without lengths that is only when
  // the first unit has been found.
  if (job.problem.mask.lengths.data) device::wait_for_previous_kernel();
  if (is_counted(job.problem)) control.table.fill(job.problem, job.cut);
  __syncthreads();

  const int helper = warp_index() - kComputingWarps;
  if (helper < 0) {
    compute_units<Element, kHeadSize, kRowEights>(job, shared);
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
