// decode_helpers.cuh: the warps that keep the computing warps of the decode kernel supplied.
#pragma once

#include "decode_merge.cuh"

namespace onnx_attn::decode {

// Arrivals of a loader at a stage's full barrier: one for what the warp has stored, and one of each lane for its copies.
inline constexpr int kLoaderArrivals = 1 + 32;

// Has keys from the unit's first to `end`, or their values, brought to the L2 cache, if their rows lie side by side.
template <class Element>
__device__ __forceinline__ void prefetch_rows(const KeyRows<Element>& rows, const Unit& unit, int end) {
  constexpr int kPiece = 16 * 1024;  // bytes
  if (rows.stored.row_stride != rows.columns) return;
  const int bytes = (end - unit.begin) * rows.columns * static_cast<int>(sizeof(Element));
  const char* source = reinterpret_cast<const char*>(KeyRows<Element>::row(rows.stored, unit, unit.begin));
  for (int at = lane_index() * kPiece; at < bytes; at += 32 * kPiece) device::prefetch_to_l2(source + at, min(kPiece, bytes - at));
}

// A loader's share of as much of a unit as the ring holds.
template <class Element, int kHeadSize>
__device__ __forceinline__ void prefetch_tiles(const Job& job, const Unit& unit, const LoaderShare& share) {
  int end = min(unit.end, unit.begin + job.stages * Stage<kHeadSize>::kKeys);
  if (job.copies_past) end = min(end, static_cast<int>(job.problem.append.past_len));
  if (share.loader == 0) prefetch_rows(KeyRows<Element>::keys(job.problem, job.copies_past), unit, end);
  if (share.loader == 1) prefetch_rows(KeyRows<Element>::values(job.problem, job.copies_past), unit, end);
}

// With lengths, what the first unit will be if the kernel before does not change them any more; most often it never does. All warps
// of the block call it.
template <class Element, int kHeadSize>
__device__ __forceinline__ void prefetch_likely_tiles(const Job& job, UnitTable& table, const LoaderShare& share) {
  table.fill(job.problem, job.cut);
  UnitWalk walk;
  Unit unit;
  walk.start(job.problem, job.cut, table, job.quota);
  if (share.loader >= 0 && walk.next(job.problem, job.cut, table, unit)) prefetch_tiles<Element, kHeadSize>(job, unit, share);
  __syncthreads();  // the table has been read
}

// The loaders fill the ring, as far ahead as it goes. Until the kernel before has ended they can only see to it that their first
// tiles are near.
template <class Element, int kHeadSize>
__device__ __forceinline__ void load_tiles(const Job& job, const SharedMemory<kHeadSize>& shared, const LoaderShare& share) {
  using S = Stage<kHeadSize>;
  Handover<kMaxStages>& ring = shared.control->ring;
  const auto keys = KeyRows<Element>::keys(job.problem, job.copies_past), values = KeyRows<Element>::values(job.problem, job.copies_past);
  const LanePiece<kHeadSize> lane;
  RingPlace place;
  bool is_first = !finds_units_in_memory(job.problem);  // else the kernel before has ended
  for_each_unit(job, shared.control->table, [&](const Unit& unit) {
    if (is_first) prefetch_tiles<Element, kHeadSize>(job, unit, share);
    is_first = false;
    device::wait_for_previous_kernel();
    const int first_row = unit.row_block * job.cut.block_rows();
    const NewRows new_rows(job.problem, unit);
    const LaneSource<Element> key_source(keys, unit, lane), value_source(values, unit, lane);
    for (int key = first_tile<kHeadSize>(unit); key < unit.end; key += S::kKeys, place.advance(job.stages)) {
      const uint32_t stage = shared_address(shared.stage(place.index()));
      place.wait_empty(ring);
      if (new_rows.meets(key, key + S::kKeys)) {
        copy_tile_with_new_rows<Element, kHeadSize>(keys, unit, new_rows, key, stage, share);
        copy_tile_with_new_rows<Element, kHeadSize>(values, unit, new_rows, key, stage + S::kValues, share);
      } else {
        copy_tile<Element, kHeadSize>(key_source, value_source, key, unit.end, stage, share);
      }
      if (job.masks.bytes > 0) copy_masks<S::kKeys>(job.problem, job.masks, unit, first_row, job.cut.rows, key, stage + S::kBytes, share);
      arrive_as_warp(ring.full[place.index()]);
      device::barrier_arrive_after_copies(shared_address(&ring.full[place.index()]));
    }
  });
}

// The query rows of a unit, with their bias, as rows of shared memory: `rows` of them, of which `count` exist. The others, and
// columns past the head size, are zeros.
template <class Element, int kHeadSize>
__device__ __forceinline__ void stage_queries(const Problem& problem, const Unit& unit, int first_row, int count, int rows,
                                              uint32_t target) {
  constexpr int kPieces = kHeadSize / 8;
  const int q_len = static_cast<int>(problem.q_len), group = static_cast<int>(problem.q_heads / problem.kv_heads);
#pragma unroll 8
  for (int index = lane_index(); index < count * kPieces; index += 32) {
    const int row = index / kPieces, piece = index % kPieces;
    uint4 elements = make_uint4(0, 0, 0, 0);
    if (piece * 8 < problem.head_size) {
      const int head_in_group = (first_row + row) / q_len, query = (first_row + row) - head_in_group * q_len;
      const int64_t head = int64_t{unit.kv_head} * group + head_in_group;
      const Element* source = static_cast<const Element*>(problem.q.data) + unit.batch * problem.q.batch_stride +
                              head * problem.q.head_stride + query * problem.q.row_stride + piece * 8;
      elements = *reinterpret_cast<const uint4*>(source);
      if (problem.q_bias) elements = add_bias(elements, static_cast<const Element*>(problem.q_bias) + head * problem.head_size + piece * 8);
    }
    device::store_shared_16(target + swizzled(row, piece, rows * 128), elements);
  }
  for (int index = count * kPieces + lane_index(); index < rows * kPieces; index += 32) {
    device::store_shared_16(target + swizzled(index / kPieces, index % kPieces, rows * 128), make_uint4(0, 0, 0, 0));
  }
}

template <class Element>
__device__ __forceinline__ void store_new_rows(const KeyRows<Element>& rows, const Unit& unit, const NewRows& new_rows) {
  const int pieces = rows.columns / 8;
  for (int index = lane_index(); index < (new_rows.end - new_rows.begin) * pieces; index += 32) {
    const int key = new_rows.begin + index / pieces, piece = index % pieces;
    *reinterpret_cast<uint4*>(KeyRows<Element>::row(rows.target, unit, key) + piece * 8) =
        rows.new_piece(unit, key - new_rows.first, piece);
  }
}

// Queries and masks of a unit; and appended rows, which are stored once for each batch entry and kv head.
template <class Element, int kHeadSize>
__device__ __forceinline__ void prepare_unit(const Job& job, const SharedMemory<kHeadSize>& shared, const Unit& unit, bool is_last,
                                             int slot) {
  Control& control = *shared.control;
  PreparedUnit& prepared = control.prepared[slot];
  const int rows = job.cut.block_rows(), first_row = unit.row_block * rows;
  int whole_begin = unit.begin, whole_end = unit.end;
  for (int row = lane_index(); row < rows; row += 32) {
    RowMask& mask = prepared.rows[row];
    mask.set(job.problem, job.masks, unit, first_row, row, job.cut.rows);
    if (first_row + row >= job.cut.rows) continue;  // nobody asks what it sees
    whole_begin = max(whole_begin, mask.begin);
    whole_end = min(whole_end, mask.begin + mask.count);
  }
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    whole_begin = max(whole_begin, __shfl_xor_sync(~0u, whole_begin, lanes));
    whole_end = min(whole_end, __shfl_xor_sync(~0u, whole_end, lanes));
  }
  if (lane_index() == 0) {
    prepared.exists = true;
    prepared.is_last = is_last;
    prepared.unit = unit;
    prepared.whole = {whole_begin, whole_end};
  }
  device::wait_for_previous_kernel();
  stage_queries<Element, kHeadSize>(job.problem, unit, first_row, min(rows, job.cut.rows - first_row), rows, shared.staged_queries(slot));
  arrive_as_warp(control.units.full[slot]);
  if (job.problem.append.active && unit.is_first) {
    const NewRows new_rows(job.problem, unit);
    store_new_rows(KeyRows<Element>::keys(job.problem, job.copies_past), unit, new_rows);
    store_new_rows(KeyRows<Element>::values(job.problem, job.copies_past), unit, new_rows);
  }
}

// The preparer: has the next unit ready while the computing warps are busy with the one before, and adds up what they have found in
// those before that.
template <class Element, int kHeadSize, int kRowEights>
__device__ __forceinline__ void prepare_units(const Job& job, const SharedMemory<kHeadSize>& shared) {
  Control& control = *shared.control;
  const Results<Element, kHeadSize, kRowEights> results{job, shared};
  UnitWalk walk;
  walk.start(job.problem, job.cut, control.table, job.quota);
  Unit next;
  bool has_next = walk.next(job.problem, job.cut, control.table, next);
  RingPlace slot;
  int next_stage = 0;  // of the ring, after those of the units that have been added up
  for (int count = 0;; ++count, slot.advance(kUnitSlots)) {
    if (count >= kUnitSlots && results.are_handed_over()) {  // the unit that had the slot before
      const Unit& unit = control.prepared[slot.index()].unit;
      HeldStages held = HeldStages::of_unit<kHeadSize>(unit, next_stage, job.stages);
      held.next_stage = next_stage = (next_stage + held.tiles) % job.stages;
      device::barrier_wait(shared_address(&control.results[slot.index()]), slot.parity() ^ 1);
      results.add_up(unit, held, slot.index(), 0, lane_index(), 32);
      __syncwarp();
      for (int team = 0; team < job.cut.teams; ++team) {
        const int stage = held.of(team, job.cut.teams);
        if (stage >= 0 && lane_index() < kComputingWarps / job.cut.teams)
          device::barrier_arrive(shared_address(&control.ring.empty[stage]));
      }
      arrive_as_warp(control.merged[slot.index()]);
    }
    slot.wait_empty(control.units);
    if (!has_next) break;
    const Unit unit = next;
    has_next = walk.next(job.problem, job.cut, control.table, next);
    prepare_unit<Element, kHeadSize>(job, shared, unit, !has_next, slot.index());
  }
  if (lane_index() == 0) control.prepared[slot.index()].exists = false;
  arrive_as_warp(control.units.full[slot.index()]);
}

// Stores the rows of a tile that are not new: those the preparer stores.
template <class Element, int kHeadSize>
__device__ __forceinline__ void store_tile(const KeyRows<Element>& rows, const Unit& unit, const NewRows& new_rows, int key,
                                           const uint8_t* tile) {
  const LanePiece<kHeadSize> lane;
  Element* target = KeyRows<Element>::row(rows.target, unit, key + lane.row) + lane.piece * 8;
  const int count = lane.piece * 8 < rows.columns ? unit.end - key - lane.row : 0;
#pragma unroll 8
  for (int row = 0; row < Stage<kHeadSize>::kKeys; row += lane.kRowStep) {
    const uint4 elements = *reinterpret_cast<const uint4*>(tile + lane.place(row));
    if (row < count && !new_rows.holds(key + row + lane.row)) *reinterpret_cast<uint4*>(target) = elements;
    target += lane.kRowStep * rows.target.row_stride;
  }
}

// The writer: past rows become rows of `present` while they are in shared memory. The computing warps wait for it before they
// use a unit's last stages for their results.
template <class Element, int kHeadSize>
__device__ __forceinline__ void write_tiles(const Job& job, const SharedMemory<kHeadSize>& shared) {
  using S = Stage<kHeadSize>;
  Control& control = *shared.control;
  const auto keys = KeyRows<Element>::keys(job.problem, true), values = KeyRows<Element>::values(job.problem, true);
  RingPlace place, slot;
  for (;; slot.advance(kUnitSlots)) {
    slot.wait_full(control.units);
    if (!control.prepared[slot.index()].exists) return;
    const Unit unit = control.prepared[slot.index()].unit;
    const NewRows new_rows(job.problem, unit);
    for (int key = first_tile<kHeadSize>(unit); key < unit.end; key += S::kKeys, place.advance(job.stages)) {
      const uint8_t* stage = shared.stage(place.index());
      place.wait_full(control.ring);
      if (unit.row_block == 0) {
        store_tile<Element, kHeadSize>(keys, unit, new_rows, key, stage);
        store_tile<Element, kHeadSize>(values, unit, new_rows, key, stage + S::kValues);
      }
      arrive_as_warp(control.ring.empty[place.index()]);
    }
    arrive_as_warp(control.written[slot.index()]);
  }
}

}  // namespace onnx_attn::decode
