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
      : cut(cut), row_tile(warp_index() % cut.row_tiles), key_group(warp_index() / cut.row_tiles), team(key_group >> cut.team_shift) {}

  __device__ __forceinline__ int group_in_team() const { return key_group & ((1 << cut.team_shift) - 1); }
  __device__ __forceinline__ int warp_of(int group) const { return group * cut.row_tiles + row_tile; }  // of the same row tile
  __device__ __forceinline__ void meet() const { device::meet(1, 32 * kComputingWarps); }               // of all computing warps
};

// The stages that the teams have read last, which they keep until their results have been added up there.
struct HeldStages {
  int last_tile, tiles;  // the tile that ends the unit, and how many it has; tile t is for team t % teams
  int next_stage, stages;

  // -1: the team had no tile.
  __device__ __forceinline__ int of(int team, int teams) const {
    const int back = (last_tile - team) & (teams - 1), stage = next_stage - 1 - back;
    return back >= tiles ? -1 : stage < 0 ? stage + stages : stage;
  }
};

// Row `row` of a unit's kv head among [batch, q_heads, q_len].
__device__ __forceinline__ int result_row_of(const Job& job, const Unit& unit, int row) {
  return (unit.batch * static_cast<int>(job.problem.kv_heads) + unit.kv_head) * job.cut.rows + row;
}
// Where its first chunk has its place among the partial results.
__device__ __forceinline__ int64_t first_part_of(const Job& job, const Unit& unit, int result_row) {
  return int64_t{result_row} * job.cut.chunks + unit.chunk - unit.ordinal;
}

// A unit's result for four columns of a row: an output, or a part of one that will be added up, here or by the combine kernel.
template <class Element, bool kMayAddUp>
__device__ __forceinline__ void store_unit_result(const Job& job, const Unit& unit, int row, int column, const Partial& result,
                                                  RowSum<kMayAddUp>& sum) {
  const int result_row = result_row_of(job, unit, row);
  if (unit.entry_chunks == 1) {
    store_result(job.problem, output_row<Element>(job.problem, result_row), result_row, column, result);
    return;
  }
  const int quads = static_cast<int>(job.problem.v_head_size) / 4;
  const int64_t first_part = first_part_of(job, unit, result_row);
  if constexpr (kMayAddUp) {
    const int eight = unit.first_of_eight();
    if (job.adds_up && eight >= unit.run_begin) {
      sum.add_chunk(unit, result);
      const bool ends_eight = sum.ends_eight(unit);
      if (unit.has_whole_line()) {
        if (unit.ends_run()) store_result(job.problem, output_row<Element>(job.problem, result_row), result_row, column, sum.row);
      } else if (unit.run_begin == 0) {
        if (!unit.ends_run()) return;
        if (eight > 0 || ends_eight) job.partials.store(first_part, sum.row, quads, column);
        if (!ends_eight) job.partials.store(first_part + eight, sum.eight, quads, column);
      } else if (ends_eight || unit.ends_run()) {
        job.partials.store(first_part + eight, sum.eight, quads, column);
      }
      return;
    }
  }
  job.partials.store(first_part + unit.ordinal, result, quads, column);
}

// Adds up what the key groups have found, in their order, and stores it. A warp leaves its output in the stage that its team
// holds, which has room for one row tile or more.
template <class Element, int kHeadSize, int kRowEights, bool kMayAddUp>
__device__ __forceinline__ void merge_and_store(const Job& job, const Unit& unit, const Role& role, const SharedMemory<kHeadSize>& shared,
                                                RowTile<Element, kHeadSize, kRowEights>& rows, const HeldStages& held,
                                                RowSum<kMayAddUp>& sum) {
  constexpr int kTileRows = 8 * kRowEights, kQuads = kHeadSize / 4;  // of columns
  static_assert(Stage<kHeadSize>::kKeys / 16 * kTileRows * kHeadSize * 4 <= Stage<kHeadSize>::kBytes, "a stage has room for a team");
  Control& control = *shared.control;
  // Blocks of 8 columns are XORed with half the row, which spreads what a warp writes at once over the banks.
  const auto place = [&](int stage, int slot, int row, int column) {
    return reinterpret_cast<float*>(shared.stage(stage)) + (slot * kTileRows + row) * kHeadSize + ((column / 8) ^ (row / 2 % 4)) * 8 +
           column % 8;
  };
  // Of 256 columns, several row tiles are usual, and find room together. Elsewhere the registers are worth more.
  constexpr bool kTogether = kHeadSize == 256;
  const int row_tiles = role.cut.row_tiles;
  const int tiles_at_once = kTogether ? min(row_tiles, (Stage<kHeadSize>::kKeys / kTileRows) >> role.cut.team_shift) : 1;
  rows.finish();
  const int lane_row = 2 * (lane_index() % 4), lane_column = lane_index() / 4;
  if (lane_index() < 4) {
#pragma unroll
    for (int n = 0; n < kRowEights; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float base = rows.row_limit[n][r] == -INFINITY ? -INFINITY : rows.row_base[n][r];
        control.stats[role.warp_of(role.key_group)][8 * n + lane_row + r] = make_float2(base, rows.row_sum[n][r]);
      }
    }
  }
  const int own_stage = held.of(role.team, role.cut.teams);
  role.meet();  // the stages have been read
#pragma unroll 1
  for (int first_tile = 0; first_tile < row_tiles; first_tile += tiles_at_once) {
    const int first_row = (unit.row_block * row_tiles + first_tile) * kTileRows;
    const int row_count = min(tiles_at_once * kTileRows, job.cut.rows - first_row);
    const int own_tile = role.row_tile - first_tile;
    if (own_tile >= 0 && own_tile < tiles_at_once && own_stage >= 0) {
      const int slot = (kTogether ? own_tile << role.cut.team_shift : 0) + role.group_in_team();
#pragma unroll
      for (int n = 0; n < kRowEights; ++n) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = 8 * n + lane_row + r;
          if ((kTogether ? own_tile * kTileRows : 0) + row >= row_count) continue;
          // A row without keys may have added 0 * NaN from values that it must not see.
          const bool is_empty = rows.row_limit[n][r] == -INFINITY;
#pragma unroll
          for (int step = 0; step < kHeadSize / 16; ++step) {
            *place(own_stage, slot, row, 16 * step + lane_column) = is_empty ? 0.0f : rows.output[step][n][r];
            *place(own_stage, slot, row, 16 * step + 8 + lane_column) = is_empty ? 0.0f : rows.output[step][n][r + 2];
          }
        }
      }
    }
    role.meet();
    const int column = threadIdx.x % kQuads * 4;
    if (column < job.problem.v_head_size) {
#pragma unroll 1
      for (int row = threadIdx.x / kQuads; row < row_count; row += 32 * kComputingWarps / kQuads) {
        const int tile = kTogether ? row / kTileRows : 0, row_in_tile = kTogether ? row % kTileRows : row;
        float2 stats[kComputingWarps];
        float4 outputs[kComputingWarps];
#pragma unroll
        for (int group = 0; group < kComputingWarps; ++group) {
          const int stage = held.of(group >> role.cut.team_shift, role.cut.teams);
          const bool exists = group < role.cut.key_groups && stage >= 0;
          const int slot = (tile << role.cut.team_shift) + (group & ((1 << role.cut.team_shift) - 1));
          stats[group] = exists ? control.stats[group * row_tiles + first_tile + tile][row_in_tile] : make_float2(-INFINITY, 0.0f);
          outputs[group] =
              exists ? *reinterpret_cast<const float4*>(place(stage, slot, row_in_tile, column)) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
        store_unit_result<Element>(job, unit, first_row + row, column, Partial::sum_of(stats, outputs), sum);
      }
    }
    role.meet();  // the outputs have been read: the next row tiles may take their place, or the stages go back
  }
}

// At the end of the block: of the lines that it shares with others, it adds up those whose last part is its own. Counting parts waits
// for all that the multiprocessor has on its way, and now there is nothing.
template <class Element>
__device__ __forceinline__ void add_up_shared_lines(const Job& job, const Role& role, Control& control) {
  role.meet();  // thread 0 has noted the lines
  const int warp = warp_index(), lines = control.shared_line_count;
  if (lines == 0) return;
  if (warp < lines && lane_index() == 0) {
    control.blocks_before[warp] = device::count_on_device(job.part_counts + control.shared_lines[warp].first_block);
  }
  role.meet();
#pragma unroll 1
  for (int i = 0; i < lines; ++i) {
    const Unit& unit = control.shared_lines[i];
    if (control.blocks_before[i] < unit.line_blocks() - 1) continue;
    if (threadIdx.x == 0) job.part_counts[unit.first_block] = 0;
    const int quads = static_cast<int>(job.problem.v_head_size) / 4, block_rows = role.cut.block_rows();
    const int first_row = unit.row_block * block_rows, rows = min(block_rows, job.cut.rows - first_row);
    for (int index = threadIdx.x; index < rows * quads; index += 32 * kComputingWarps) {
      const int column = index % quads * 4;
      const int row = result_row_of(job, unit, first_row) + index / quads;
      const int64_t first_part = first_part_of(job, unit, row);
      store_result(job.problem, output_row<Element>(job.problem, row), row, column, job.partials.line_sum(unit, first_part, quads, column));
    }
  }
}

// The rows of a unit without keys.
template <class Element, bool kMayAddUp>
__device__ __forceinline__ void store_nothing(const Job& job, const Unit& unit, const Role& role, RowSum<kMayAddUp>& sum) {
  const int quads = static_cast<int>(job.problem.v_head_size) / 4, block_rows = role.cut.block_rows();
  const int first_row = unit.row_block * block_rows, rows = min(block_rows, job.cut.rows - first_row);
  for (int index = threadIdx.x; index < rows * quads; index += 32 * kComputingWarps) {
    store_unit_result<Element>(job, unit, first_row + index / quads, index % quads * 4, Partial(), sum);
  }
}

}  // namespace onnx_attn::decode
