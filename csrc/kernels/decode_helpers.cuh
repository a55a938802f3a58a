// decode_helpers.cuh: the warps that keep the computing warps of the decode kernel supplied. Each walks over the block's units by itself.
#pragma once

#include "decode_job.cuh"

namespace onnx_attn::decode {

// Arrivals at a stage's full barrier: one lane that has asked for bulk copies, or each lane's own copies.
__host__ __device__ constexpr int full_arrivals(bool in_bulk) { return in_bulk ? 1 : 32; }

// The loader: fills the ring, as far ahead as it goes.
template <class Element, int kHeadSize, bool kInBulk>
__device__ __forceinline__ void load_tiles(const Job& job, const TensorMaps& maps, const SharedMemory<kHeadSize>& shared) {
  using S = Stage<kHeadSize>;
  Handover<kMaxStages>& ring = shared.control->ring;
  const auto keys = KeyRows<Element>::keys(job.problem, job.copies_past), values = KeyRows<Element>::values(job.problem, job.copies_past);
  RingPlace place;
  for_each_unit(job, shared.control->table, [&](const Unit& unit) {
    const NewRows new_rows(job.problem, unit.batch);
    for (int key = first_tile<kHeadSize>(unit); key < unit.end; key += S::kKeys) {
      const uint32_t stage = shared.stage(place.index);
      uint64_t& full = ring.full[place.index];
      place.wait_empty(ring);
      if (new_rows.meets(key, key + S::kKeys)) {
        copy_rows<Element, kHeadSize, true>(keys, unit, new_rows, key, stage);
        copy_rows<Element, kHeadSize, true>(values, unit, new_rows, key, stage + S::kValues);
        device::copy_async_wait_all();
        __syncwarp();
        if (lane_index() < full_arrivals(kInBulk)) device::barrier_arrive(shared_address(&full));
      } else if constexpr (kInBulk) {
        if (lane_index() == 0) load_stage_in_bulk<kHeadSize>(maps, unit, key, stage, full);
      } else {
        copy_rows<Element, kHeadSize, false>(keys, unit, new_rows, key, stage);
        copy_rows<Element, kHeadSize, false>(values, unit, new_rows, key, stage + S::kValues);
        device::barrier_arrive_after_copies(shared_address(&full));
      }
      __syncwarp();
      place.advance(job.stages);
    }
  });
}

// The query rows of a unit, with their bias, as rows of shared memory. Rows and columns that do not exist are zeros.
template <class Element, int kHeadSize>
__device__ __forceinline__ void stage_queries(const Job& job, const Unit& unit, int first_row, uint32_t target) {
  constexpr int kPieces = kHeadSize / 8;
  const Problem& problem = job.problem;
  const int q_len = static_cast<int>(problem.q_len), group = static_cast<int>(problem.q_heads / problem.kv_heads);
  const int rows = job.cut.row_tiles * kTileRows;
#pragma unroll 4
  for (int index = lane_index(); index < rows * kPieces; index += 32) {
    const int row = index / kPieces, piece = index % kPieces;
    uint4 elements = make_uint4(0, 0, 0, 0);
    if (first_row + row < job.cut.rows && piece * 8 < problem.head_size) {
      const int head_in_group = (first_row + row) / q_len, query = (first_row + row) - head_in_group * q_len;
      const int64_t head = int64_t{unit.kv_head} * group + head_in_group;
      const Element* source = static_cast<const Element*>(problem.q.data) + unit.batch * problem.q.batch_stride +
                              head * problem.q.head_stride + query * problem.q.row_stride + piece * 8;
      elements = *reinterpret_cast<const uint4*>(source);
      if (problem.q_bias) elements = add_bias(elements, static_cast<const Element*>(problem.q_bias) + head * problem.head_size + piece * 8);
    }
    device::store_shared_16(target + swizzled(row, piece, rows * 128), elements);
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
  for_each_unit(job, control.table, [&](const Unit& unit) {
    PreparedUnit& prepared = control.prepared[place.index];
    const int rows = job.cut.row_tiles * kTileRows, first_row = unit.row_block * rows;
    place.wait_empty(control.units);
    stage_queries<Element, kHeadSize>(job, unit, first_row, shared.staged_queries(place.index));
    for (int row = lane_index(); row < rows; row += 32) prepared.rows[row].set(job.problem, unit, first_row + row, job.cut.rows);
    if (lane_index() == 0) {
      prepared.exists = true;
      prepared.unit = unit;
    }
    arrive_as_warp(control.units.full[place.index]);
    if (job.problem.append.active && unit.is_first) {
      const NewRows new_rows(job.problem, unit.batch);
      store_new_rows(KeyRows<Element>::keys(job.problem, job.copies_past), unit, new_rows);
      store_new_rows(KeyRows<Element>::values(job.problem, job.copies_past), unit, new_rows);
    }
    place.advance(kUnitSlots);
  });
  place.wait_empty(control.units);
  if (lane_index() == 0) control.prepared[place.index].exists = false;
  arrive_as_warp(control.units.full[place.index]);
}

// Stores the rows of a tile that are not new: those the preparer stores.
template <class Element, int kHeadSize>
__device__ __forceinline__ void store_tile(const KeyRows<Element>& rows, const Unit& unit, const NewRows& new_rows, int key,
                                           const uint8_t* tile) {
  using S = Stage<kHeadSize>;
  constexpr int kPieces = kHeadSize / 8;
  constexpr int kRowStep = 32 / kPieces;
  const int piece = lane_index() % kPieces, first_row = lane_index() / kPieces;
  Element* target = KeyRows<Element>::row(rows.target, unit, key + first_row) + piece * 8;
  const int count = piece * 8 < rows.columns ? unit.end - key : 0;
#pragma unroll 8
  for (int row = first_row; row < S::kKeys; row += kRowStep) {
    const uint4 elements = *reinterpret_cast<const uint4*>(tile + swizzled(row, piece, S::kPanelBytes));
    if (row < count && !new_rows.holds(key + row)) *reinterpret_cast<uint4*>(target) = elements;
    target += kRowStep * rows.target.row_stride;
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
    if (!control.prepared[slot.index].exists) return;
    const Unit unit = control.prepared[slot.index].unit;
    const NewRows new_rows(job.problem, unit.batch);
    for (int key = first_tile<kHeadSize>(unit); key < unit.end; key += S::kKeys, place.advance(job.stages)) {
      const uint8_t* stage = shared.ring + place.index * S::kBytes;
      place.wait_full(control.ring);
      if (unit.row_block == 0) {
        store_tile<Element, kHeadSize>(keys, unit, new_rows, key, stage);
        store_tile<Element, kHeadSize>(values, unit, new_rows, key, stage + S::kValues);
      }
      arrive_as_warp(control.ring.empty[place.index]);
    }
    arrive_as_warp(control.written[slot.index]);
  }
}

}  // namespace onnx_attn::decode
