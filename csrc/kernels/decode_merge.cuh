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
  int row_tiles;

  __device__ __forceinline__ explicit Role(const Partition& cut) {
    row_tiles = cut.row_tiles;
    row_tile = warp_index() % cut.row_tiles;
    key_group = warp_index() / cut.row_tiles;
    team_groups = cut.key_groups / cut.teams;
    team = key_group / team_groups;
    threads = 32 * cut.row_tiles * cut.key_groups;
  }
  __device__ __forceinline__ int group_in_team() const { return key_group - team * team_groups; }
  __device__ __forceinline__ int warp_of(int group) const { return group * row_tiles + row_tile; }  // of the same row tile
  __device__ __forceinline__ void meet() const { device::meet(1, threads); }
};

// A unit's result for four columns of a row: an output, or a part of one that the combine kernel will add up.
template <class Element>
__device__ __forceinline__ void store_unit_result(const Job& job, const Unit& unit, int row, int column, const float4& output,
                                                  const float2& total) {
  const int result_row = (unit.batch * static_cast<int>(job.problem.kv_heads) + unit.kv_head) * job.cut.rows + row;
  if (unit.entry_chunks == 1) {
    store_result(job.problem, output_row<Element>(job.problem, result_row), result_row, column, output, total.x, total.y);
    return;
  }
  const int64_t index = int64_t{result_row} * job.cut.chunks + unit.chunk;
  job.partials.outputs[(index * job.problem.v_head_size + column) / 4] = output;
  if (column == 0) job.partials.stats[index] = total;
}

// Brings the outputs of all warps of a row tile to the maximum that they have in common, and notes the sum of their weights.
template <class Element, int kHeadSize>
__device__ __forceinline__ void agree_on_maximum(const Job& job, const Role& role, Control& control, RowTile<Element, kHeadSize>& rows) {
  const float2(&stats)[kMaxComputingWarps][kTileRows] = control.stats;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = lane_index() / 4 + 8 * r;
    float max = -INFINITY, sum = 0.0f;
    for (int group = 0; group < job.cut.key_groups; ++group) max = fmaxf(max, stats[role.warp_of(group)][row].x);
    const float reference = max == -INFINITY ? 0.0f : max;
    for (int group = 0; group < job.cut.key_groups; ++group) {
      const float2 part = stats[role.warp_of(group)][row];
      sum = fmaf(device::exp2_fast(part.x - reference), part.y, sum);
    }
    const float factor = device::exp2_fast(rows.row_max[r] - reference);
#pragma unroll
    for (int i = 0; i < kHeadSize / 8; ++i) {
      rows.output[i][2 * r] *= factor;
      rows.output[i][2 * r + 1] *= factor;
    }
    if (role.key_group == 0 && lane_index() % 4 == 0) control.totals[role.row_tile * kTileRows + row] = make_float2(max, sum);
  }
}

// Adds up what the key groups have found, in their order, and stores it. A warp leaves its output in `held_stage`, which its
// team has read last and not yet given back: it has just the room for one row tile. -1: the team had no tile.
template <class Element, int kHeadSize>
__device__ __forceinline__ void merge_and_store(const Job& job, const Unit& unit, const Role& role, const SharedMemory<kHeadSize>& shared,
                                                RowTile<Element, kHeadSize>& rows, int held_stage) {
  constexpr int kQuads = kHeadSize / 4;  // of columns
  Control& control = *shared.control;
  // Blocks of 8 columns are XORed with the row, which spreads the rows that a warp writes at once over the banks.
  const auto place = [&](int stage, int group_in_team, int row, int column) {
    return shared.stage_floats(stage) + (group_in_team * kTileRows + row) * kHeadSize + ((column / 8) ^ (row % 8)) * 8 + column % 8;
  };
  rows.finish();
  const int warp = role.warp_of(role.key_group);
  if (lane_index() % 4 == 0) {
    control.stats[warp][lane_index() / 4] = make_float2(rows.row_max[0], rows.row_sum[0]);
    control.stats[warp][lane_index() / 4 + 8] = make_float2(rows.row_max[1], rows.row_sum[1]);
  }
  if (lane_index() == 0) control.held_stage[warp] = held_stage;
  role.meet();  // and the stages have been read
  agree_on_maximum(job, role, control, rows);

#pragma unroll 1
  for (int tile = 0; tile < job.cut.row_tiles; ++tile) {
    const int first_row = (unit.row_block * job.cut.row_tiles + tile) * kTileRows;
    const int row_count = min(kTileRows, job.cut.rows - first_row);
    if (role.row_tile == tile && held_stage >= 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = lane_index() / 4 + 8 * r;
        if (row >= row_count) continue;
#pragma unroll
        for (int i = 0; i < kHeadSize / 8; ++i) {
          *reinterpret_cast<float2*>(place(held_stage, role.group_in_team(), row, 8 * i + lane_key())) =
              make_float2(rows.output[i][2 * r], rows.output[i][2 * r + 1]);
        }
      }
    }
    role.meet();
    const int column = threadIdx.x % kQuads * 4;
    if (column < job.problem.v_head_size) {
      for (int row = threadIdx.x / kQuads; row < row_count; row += role.threads / kQuads) {
        float4 output = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
        for (int group = 0; group < job.cut.key_groups; ++group) {
          const int stage = control.held_stage[group * job.cut.row_tiles + tile];
          if (stage < 0) continue;
          const float4 part = *reinterpret_cast<const float4*>(place(stage, group & (role.team_groups - 1), row, column));
          output.x += part.x;
          output.y += part.y;
          output.z += part.z;
          output.w += part.w;
        }
        store_unit_result<Element>(job, unit, first_row + row, column, output, control.totals[tile * kTileRows + row]);
      }
    }
    role.meet();  // the outputs have been read: the next row tile may take their place, or the stages go back
  }
}

// The rows of a unit without keys.
template <class Element>
__device__ __forceinline__ void store_nothing(const Job& job, const Unit& unit, const Role& role) {
  const int quads = static_cast<int>(job.problem.v_head_size) / 4, block_rows = job.cut.row_tiles * kTileRows;
  const int first_row = unit.row_block * block_rows, rows = min(block_rows, job.cut.rows - first_row);
  for (int index = threadIdx.x; index < rows * quads; index += role.threads) {
    store_unit_result<Element>(job, unit, first_row + index / quads, index % quads * 4, make_float4(0.0f, 0.0f, 0.0f, 0.0f),
                               make_float2(-INFINITY, 0.0f));
  }
}

}  // namespace onnx_attn::decode
