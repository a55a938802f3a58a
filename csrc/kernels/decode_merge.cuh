// decode_merge.cuh: the end of a unit: the warps of a row tile add up their results.
#pragma once

#include "../device/decode_rows.cuh"
#include "decode_job.cuh"

namespace onnx_attn::decode {

// Which rows and keys a computing warp works on, and how it meets the others.
struct Role {
  const Partition& cut;
  int row_tile, key_group, team;

  __device__ __forceinline__ explicit Role(const Partition& cut)
      : cut(cut),
        row_tile(warp_index() % cut.row_tiles),
        key_group(warp_index() / cut.row_tiles),
        team(key_group < cut.team_groups ? 0 : 1) {}

  __device__ __forceinline__ int group_in_team() const { return key_group - team * cut.team_groups; }
  __device__ __forceinline__ int warp_of(int group) const { return group * cut.row_tiles + row_tile; }  // of the same row tile
  __device__ __forceinline__ int threads() const { return 32 * cut.row_tiles * cut.key_groups; }        // of all computing warps
  __device__ __forceinline__ void meet() const { device::meet(1, threads()); }
};

// The stages that the teams have read last and not yet given back. -1: the team had no tile.
struct HeldStages {
  int ours = -1, theirs = -1;
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

// The factor that brings the output of the lane's row to the maximum that all warps of the row tile have in common. The four
// lanes of a row ask two warps each, for every warp of the block waits for this. Notes the total of the row.
__device__ __forceinline__ float factor_to_common_maximum(const Role& role, Control& control, int row, float row_max) {
  static_assert(kMaxKeyGroups == 8);
  const int group = lane_index() % 4;
  float2 parts[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool exists = group + 4 * i < role.cut.key_groups;
    parts[i] = exists ? control.stats[role.warp_of(group + 4 * i)][row] : make_float2(-INFINITY, 0.0f);
  }
  float max = fmaxf(parts[0].x, parts[1].x);
  max = fmaxf(max, __shfl_xor_sync(~0u, max, 1));
  max = fmaxf(max, __shfl_xor_sync(~0u, max, 2));
  const float reference = max == -INFINITY ? 0.0f : max;
  float sum = device::exp2_fast(parts[0].x - reference) * parts[0].y + device::exp2_fast(parts[1].x - reference) * parts[1].y;
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  if (role.key_group == 0 && group == 0) control.totals[role.row_tile * kTileRows + row] = make_float2(max, sum);
  return device::exp2_fast(row_max - reference);
}

// Adds up what the key groups have found, in their order, and stores it. A warp leaves its output in the stage that its team
// holds, which has just the room for one row tile.
template <class Element, int kHeadSize>
__device__ __forceinline__ void merge_and_store(const Job& job, const Unit& unit, const Role& role, const SharedMemory<kHeadSize>& shared,
                                                RowTile<Element, kHeadSize>& rows, const HeldStages& held) {
  constexpr int kGroups = max_computing_warps(kHeadSize), kQuads = kHeadSize / 4;  // of columns
  Control& control = *shared.control;
  // Blocks of 8 columns are XORed with the row, which spreads the rows that a warp writes at once over the banks.
  const auto place = [&](int stage, int group_in_team, int row, int column) {
    return reinterpret_cast<float*>(shared.stage(stage)) + (group_in_team * kTileRows + row) * kHeadSize + ((column / 8) ^ (row % 8)) * 8 +
           column % 8;
  };
  rows.finish();
  const int lane_row = lane_index() / 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (lane_index() % 4 == 0)
      control.stats[role.warp_of(role.key_group)][lane_row + 8 * r] = make_float2(rows.row_max[r], rows.row_sum[r]);
  }
  role.meet();  // and the stages have been read
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) factor[r] = factor_to_common_maximum(role, control, lane_row + 8 * r, rows.row_max[r]);

#pragma unroll 1
  for (int tile = 0; tile < role.cut.row_tiles; ++tile) {
    const int first_row = (unit.row_block * role.cut.row_tiles + tile) * kTileRows;
    const int row_count = min(kTileRows, job.cut.rows - first_row);
    if (role.row_tile == tile && held.ours >= 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (lane_row + 8 * r >= row_count) continue;
#pragma unroll
        for (int i = 0; i < kHeadSize / 8; ++i) {
          // A row without keys may have added 0 * NaN from values that it must not see.
          const bool is_empty = rows.row_sum[r] == 0.0f;
          *reinterpret_cast<float2*>(place(held.ours, role.group_in_team(), lane_row + 8 * r, 8 * i + lane_key())) =
              is_empty ? make_float2(0.0f, 0.0f) : make_float2(rows.output[i][2 * r] * factor[r], rows.output[i][2 * r + 1] * factor[r]);
        }
      }
    }
    role.meet();
    const int column = threadIdx.x % kQuads * 4;
    if (column < job.problem.v_head_size) {
#pragma unroll 1
      for (int row = threadIdx.x / kQuads; row < row_count; row += role.threads() / kQuads) {
        float4 output = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          const int team = group < role.cut.team_groups ? 0 : 1;
          const int stage = team == role.team ? held.ours : held.theirs;
          if (group >= role.cut.key_groups || stage < 0) continue;
          const float4 part = *reinterpret_cast<const float4*>(place(stage, group & (role.cut.team_groups - 1), row, column));
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
  const int quads = static_cast<int>(job.problem.v_head_size) / 4, block_rows = role.cut.row_tiles * kTileRows;
  const int first_row = unit.row_block * block_rows, rows = min(block_rows, job.cut.rows - first_row);
  for (int index = threadIdx.x; index < rows * quads; index += role.threads()) {
    store_unit_result<Element>(job, unit, first_row + index / quads, index % quads * 4, make_float4(0.0f, 0.0f, 0.0f, 0.0f),
                               make_float2(-INFINITY, 0.0f));
  }
}

}  // namespace onnx_attn::decode
