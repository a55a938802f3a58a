// decode_helpers.cuh: the warps that keep the computing warps of the decode kernel supplied.
#pragma once

#include "decode_job.cuh"

namespace onnx_attn::decode {

// Arrivals of a loader at a stage's full barrier: one for what the warp has stored, and one of each lane for its copies.
inline constexpr int kLoaderArrivals = 1 + 32;

// The loaders fill the ring, as far ahead as it goes.
template <class Element, int kHeadSize>
__device__ __forceinline__ void load_tiles(const Job& job, const SharedMemory<kHeadSize>& shared, const LoaderShare& share) {
  using S = Stage<kHeadSize>;
  Handover<kMaxStages>& ring = shared.control->ring;
  const auto keys = KeyRows<Element>::keys(job.problem, job.copies_past), values = KeyRows<Element>::values(job.problem, job.copies_past);
  const LanePiece<kHeadSize> lane;
  RingPlace place;
  Dealer dealer(job, *shared.control, share.loader == 0);
  for_each_unit(job, shared.control->table, dealer, [&](const Unit& unit) {
    device::wait_for_previous_kernel();
    if (unit.ends_share) dealer.take_ahead();
    const int first_row = unit.row_block * job.cut.block_rows();
    const NewRows new_rows(job.problem, unit.batch);
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

// Starts copying the query rows of a unit, with their bias, to rows of shared memory: `rows` of them, of which `count` exist. The others,
// and columns past the head size, are zeros.
template <class Element, int kHeadSize>
__device__ __forceinline__ void copy_queries(const Problem& problem, const Unit& unit, int first_row, int count, int rows,
                                             uint32_t target) {
  constexpr int kPieces = kHeadSize / 8;
  const int q_len = static_cast<int>(problem.q_len), group = static_cast<int>(problem.q_heads / problem.kv_heads);
#pragma unroll 4
  for (int index = lane_index(); index < rows * kPieces; index += 32) {
    const int row = index / kPieces, piece = index % kPieces;
    const bool exists = row < count && piece * 8 < problem.head_size;
    const int group_row = first_row + (exists ? row : 0), head_in_group = q_len == 1 ? group_row : group_row / q_len;
    const int64_t head = int64_t{unit.kv_head} * group + head_in_group;
    const Element* source = static_cast<const Element*>(problem.q.data) + unit.batch * problem.q.batch_stride +
                            head * problem.q.head_stride + (group_row - head_in_group * q_len) * problem.q.row_stride + piece * 8;
    const uint32_t place = target + swizzled(row, piece, rows * 128);
    if (exists && problem.q_bias) {
      const Element* bias = static_cast<const Element*>(problem.q_bias) + head * problem.head_size + piece * 8;
      device::store_shared_16(place, add_bias(*reinterpret_cast<const uint4*>(source), bias));
    } else {
      device::copy_async_16(place, source, exists ? 16 : 0);
    }
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

// The preparer: queries and masks of the next unit, while the computing warps are busy with the one before; and appended rows,
// which it stores once for each batch entry and kv head.
template <class Element, int kHeadSize>
__device__ __forceinline__ void prepare_units(const Job& job, const SharedMemory<kHeadSize>& shared) {
  Control& control = *shared.control;
  RingPlace place;
  Dealer dealer(job, control, false);
  for_each_unit(job, control.table, dealer, [&](const Unit& unit) {
    PreparedUnit& prepared = control.prepared[place.index()];
    const int rows = job.cut.block_rows(), first_row = unit.row_block * rows;
    place.wait_empty(control.units);
    // Before anything else: the queries queue behind all that the loaders have asked for by then, and the computing warps wait for them.
    device::wait_for_previous_kernel();
    copy_queries<Element, kHeadSize>(job.problem, unit, first_row, min(rows, job.cut.rows - first_row), rows,
                                     shared.staged_queries(place.index()));
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
      prepared.unit = unit;
      prepared.whole = {whole_begin, whole_end};
    }
    device::copy_async_wait_all();
    arrive_as_warp(control.units.full[place.index()]);
    if (job.problem.append.active && unit.is_first) {
      const NewRows new_rows(job.problem, unit.batch);
      store_new_rows(KeyRows<Element>::keys(job.problem, job.copies_past), unit, new_rows);
      store_new_rows(KeyRows<Element>::values(job.problem, job.copies_past), unit, new_rows);
    }
    place.advance(kUnitSlots);
  });
  place.wait_empty(control.units);
  if (lane_index() == 0) control.prepared[place.index()].exists = false;
  arrive_as_warp(control.units.full[place.index()]);
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
    const NewRows new_rows(job.problem, unit.batch);
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
