// decode_merge.cuh: the end of a unit: the warps of a row tile add up their results.
#pragma once

#include "../device/decode_rows.cuh"
#include "decode_job.cuh"

namespace onnx_attn::decode {

// Which rows and keys a computing warp works on, and how it meets the others.
struct Role {
  int row_tile, key_group;
  int team;         // takes every teams-th tile
  int team_groups;  // key groups of a team, a power of two
  int threads;      // of all computing warps

  __device__ __forceinline__ explicit Role(const Partition& cut) {
    row_tile = warp_index() % cut.row_tiles;
    key_group = warp_index() / cut.row_tiles;
    team_groups = cut.key_groups / cut.teams;
    team = key_group / team_groups;
    threads = 32 * cut.row_tiles * cut.key_groups;
  }
  __device__ __forceinline__ int group_in_team() const { return key_group - team * team_groups; }
  __device__ __forceinline__ void meet() const { device::meet(1, threads); }
};

// A unit's result for one row: an output, or a part of one that the combine kernel will add up.
template <class Element>
__device__ __forceinline__ void store_unit_result(const Job& job, const Unit& unit, int row, int column, const Partial& result) {
  const int output_row = (unit.batch * static_cast<int>(job.problem.kv_heads) + unit.kv_head) * job.cut.rows + row;
  if (unit.entry_chunks == 1) return store_result<Element>(job.problem, output_row, column, result);
  const int64_t index = int64_t{output_row} * job.cut.chunks + unit.chunk;
  job.partials.outputs[(index * job.problem.v_head_size + column) / 4] = result.output;
  if (column == 0) job.partials.stats[index] = make_float2(result.max, result.sum);
}

// Adds up what the key groups have found, in their order, and stores it. A group leaves its results in `held_stage`, which its
// team has read last and not yet given back: it has just the room for one row tile. -1: the team had no tile.
template <class Element, int kHeadSize>
__device__ __forceinline__ void merge_and_store(const Job& job, const Unit& unit, const Role& role, const SharedMemory<kHeadSize>& shared,
                                                RowTile<Element, kHeadSize>& rows, int held_stage) {
  constexpr int kBatch = 4;              // groups whose results are read at once
  constexpr int kQuads = kHeadSize / 4;  // of columns
  GroupResults(&results)[kMaxKeyGroups] = shared.control->results;
  // Blocks of 8 columns are XORed with the row, which spreads the rows that a warp writes at once over the banks.
  const auto place = [&](int stage, int group_in_team, int row, int column) {
    return shared.stage_floats(stage) + (group_in_team * kTileRows + row) * kHeadSize + ((column / 8) ^ (row % 8)) * 8 + column % 8;
  };
  rows.finish();
#pragma unroll 1
  for (int tile = 0; tile < job.cut.row_tiles; ++tile) {
    const int first_row = (unit.row_block * job.cut.row_tiles + tile) * kTileRows;
    const int row_count = min(kTileRows, job.cut.rows - first_row);
    role.meet();  // the stages, or the results of the tile before, have been read
    if (role.row_tile == tile) {
      GroupResults& mine = results[role.key_group];
      if (lane_index() == 0) mine.stage = held_stage;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = lane_index() / 4 + 8 * r;
        if (held_stage < 0 || row >= row_count) continue;
#pragma unroll
        for (int i = 0; i < kHeadSize / 8; ++i) {
          *reinterpret_cast<float2*>(place(held_stage, role.group_in_team(), row, 8 * i + lane_key())) =
              make_float2(rows.output[i][2 * r], rows.output[i][2 * r + 1]);
        }
        if (lane_index() % 4 == 0) mine.stats[row] = make_float2(rows.row_max[r], rows.row_sum[r]);
      }
    }
    role.meet();
    for (int index = threadIdx.x; index < row_count * kQuads; index += role.threads) {
      const int row = index / kQuads, column = index % kQuads * 4;
      if (column >= job.problem.v_head_size) continue;
      Partial result;
      for (int first = 0; first < job.cut.key_groups; first += kBatch) {
        float2 stats[kBatch];
        float4 outputs[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int group = first + i, stage = group < job.cut.key_groups ? results[group].stage : -1;
          stats[i] = stage >= 0 ? results[group].stats[row] : make_float2(-INFINITY, 0.0f);
          outputs[i] = make_float4(0, 0, 0, 0);
          if (stage >= 0) outputs[i] = *reinterpret_cast<const float4*>(place(stage, group & (role.team_groups - 1), row, column));
        }
        result.add(stats, outputs);
      }
      store_unit_result<Element>(job, unit, first_row + row, column, result);
    }
  }
  role.meet();  // all results have been read: the stages may go back
}

// The rows of a unit without keys.
template <class Element>
__device__ __forceinline__ void store_nothing(const Job& job, const Unit& unit, const Role& role) {
  const int quads = static_cast<int>(job.problem.v_head_size) / 4, block_rows = job.cut.row_tiles * kTileRows;
  const int first_row = unit.row_block * block_rows, rows = min(block_rows, job.cut.rows - first_row);
  for (int index = threadIdx.x; index < rows * quads; index += role.threads) {
    store_unit_result<Element>(job, unit, first_row + index / quads, index % quads * 4, Partial());
  }
}

}  // namespace onnx_attn::decode
