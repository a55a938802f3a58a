// decode_merge.cuh: the end of a unit: the results of the warps of a row tile are added up.
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
  __device__ __forceinline__ int warp_of(int group) const { return group * cut.row_tiles + row_tile; }     // of the same row tile
  __device__ __forceinline__ void meet() const { device::meet(1, 32 * kComputingWarps); }                  // of all computing warps
  __device__ __forceinline__ void meet_group() const { device::meet(2 + key_group, 32 * cut.row_tiles); }  // of those with the same keys
};

// The stages that the teams have read last, which they keep until their results have been added up there.
struct HeldStages {
  template <int kHeadSize>
  static __device__ __forceinline__ HeldStages of_unit(const Unit& unit, int next_stage, int stages) {
    constexpr int kKeys = Stage<kHeadSize>::kKeys;
    const int last = (unit.end - 1) / kKeys;
    return {last, unit.begin < unit.end ? last - unit.begin / kKeys + 1 : 0, next_stage, stages};
  }

  int last_tile, tiles;  // the tile that ends the unit, and how many it has; tile t is for team t % teams
  int next_stage, stages;

  // -1: the team had no tile.
  __device__ __forceinline__ int of(int team, int teams) const {
    const int back = (last_tile - team) & (teams - 1), stage = next_stage - 1 - back;
    return back >= tiles ? -1 : stage < 0 ? stage + stages : stage;
  }
};

// A unit's result for four columns of a row: an output, or a part of one that will be added up, here or by the combine kernel. `place` is
// theirs in the sums of the line.
template <class Element>
__device__ __forceinline__ void store_unit_result(const Job& job, const Unit& unit, int row_in_line, int column, const Partial& result,
                                                  LineSums& sums, int place) {
  const int result_row = (unit.batch * static_cast<int>(job.problem.kv_heads) + unit.kv_head) * job.cut.rows + row_in_line;
  const auto store_row = [&](const Partial& sum) {
    store_result(job.problem, output_row<Element>(job.problem, result_row), result_row, column, sum);
  };
  if (unit.entry_chunks == 1) return store_row(result);
  const int quads = static_cast<int>(job.problem.v_head_size) / 4;
  const int64_t first_part = int64_t{result_row} * job.cut.chunks + unit.chunk - unit.ordinal;
  const int first = unit.first_of_eight();
  if (!job.adds_up || first < unit.run_begin) {
    return job.partials.store(first_part + unit.ordinal, result, quads, column);
  }
  Partial eight, row;
  if (unit.ordinal > first) eight = sums.eight(place);
  eight.add(result);
  const bool ends_eight = unit.ends_eight(), ends_run = unit.ends_run(), begins_line = unit.run_begin == 0;
  if (begins_line && first > 0) row = sums.row(place);
  if (ends_eight) row.add(eight);
  if (begins_line ? !ends_run : !ends_run && !ends_eight) {
    return ends_eight ? sums.set_row(place, row) : sums.set_eight(place, eight);
  }
  if (unit.has_whole_line()) return store_row(row);
  if (begins_line && (first > 0 || ends_eight)) job.partials.store(first_part, row, quads, column);
  if (!begins_line || !ends_eight) job.partials.store(first_part + first, eight, quads, column);
}

// How results pass from the computing warps to who adds them up. A warp leaves the output of its row tile in the stage that its team
// has read last, in place of the first 16 keys of its group and their values, which have room for 16 rows.
template <class Element, int kHeadSize, int kRowEights>
struct Results {
  using S = Stage<kHeadSize>;
  static constexpr int kTileRows = 8 * kRowEights, kRoom = 16;  // rows
  static constexpr int kQuads = kHeadSize / 4;                  // of columns

  const Job& job;
  const SharedMemory<kHeadSize>& shared;

  // Where all rows of a block have room, the preparer adds up what it can while the computing warps are busy with the next unit.
  __device__ __forceinline__ bool are_handed_over() const { return job.cut.block_rows() <= kRoom; }
  __device__ __forceinline__ int tiles_at_once() const { return min(job.cut.row_tiles, kRoom / kTileRows); }

  // Blocks of 8 columns are XORed with half the row, which spreads what a warp writes at once over the banks.
  __device__ __forceinline__ float* place(int stage, int group_in_team, int row, int column) const {
    constexpr int kRun = 512;  // floats, of 16 keys in a panel
    const int index = row * kHeadSize + ((column / 8) ^ (row / 2 % 4)) * 8 + column % 8;
    return reinterpret_cast<float*>(shared.stage(stage) + index / kRun * S::kPanelBytes + group_in_team * kRun * 4) + index % kRun;
  }

  __device__ __forceinline__ void leave_stats(const Role& role, RowTile<Element, kHeadSize, kRowEights>& rows, int slot) const {
    rows.finish();
    if (lane_index() >= 4) return;
#pragma unroll
    for (int n = 0; n < kRowEights; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float base = rows.row_limit[n][r] == -INFINITY ? -INFINITY : rows.row_base[n][r];
        shared.control->stats[slot][role.warp_of(role.key_group)][8 * n + 2 * lane_index() + r] = make_float2(base, rows.row_sum[n][r]);
      }
    }
  }

  // If the warp's row tile is among those that have room, from `first_tile` on.
  __device__ __forceinline__ void leave_output(const Unit& unit, const Role& role, const RowTile<Element, kHeadSize, kRowEights>& rows,
                                               int stage, int first_tile) const {
    const int own_tile = role.row_tile - first_tile;
    if (own_tile < 0 || own_tile >= tiles_at_once() || stage < 0) return;
    const int row_count = job.cut.rows - (unit.row_block * job.cut.row_tiles + role.row_tile) * kTileRows;
    const int lane_row = 2 * (lane_index() % 4), lane_column = lane_index() / 4;
#pragma unroll
    for (int n = 0; n < kRowEights; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = 8 * n + lane_row + r;
        if (row >= row_count) continue;
        // A row without keys may have added 0 * NaN from values that it must not see.
        const bool is_empty = rows.row_limit[n][r] == -INFINITY;
#pragma unroll
        for (int step = 0; step < kHeadSize / 16; ++step) {
          float* target = place(stage, role.group_in_team(), own_tile * kTileRows + row, 16 * step + lane_column);
          target[0] = is_empty ? 0.0f : rows.output[step][n][r];
          *place(stage, role.group_in_team(), own_tile * kTileRows + row, 16 * step + 8 + lane_column) =
              is_empty ? 0.0f : rows.output[step][n][r + 2];
        }
      }
    }
  }

  // Adds up what the key groups have left, in their order, and stores it: the share of one of `threads` threads.
  __device__ __forceinline__ void add_up(const Unit& unit, const HeldStages& held, int slot, int first_tile, int thread,
                                         int threads) const {
    const Partition& cut = job.cut;
    const int first_row = (unit.row_block * cut.row_tiles + first_tile) * kTileRows;
    const int row_count = min(tiles_at_once() * kTileRows, cut.rows - first_row);
#pragma unroll 1
    for (int index = thread; index < row_count * kQuads; index += threads) {
      const int row = index / kQuads, column = index % kQuads * 4, tile = row / kTileRows;
      if (column >= job.problem.v_head_size) continue;
      const float2* stats = &shared.control->stats[slot][first_tile + tile][row % kTileRows];
      Partial sum;
      float2 stat[kComputingWarps];
      float4 output[kComputingWarps];
#pragma unroll
      for (int group = 0; group < kComputingWarps; ++group) {
        const int stage = held.of(group >> cut.team_shift, cut.teams), group_in_team = group & ((1 << cut.team_shift) - 1);
        const bool exists = group < cut.key_groups && stage >= 0;
        stat[group] = exists ? stats[group * cut.row_tiles * kRoom] : make_float2(-INFINITY, 0.0f);
        output[group] =
            exists ? *reinterpret_cast<const float4*>(place(stage, group_in_team, row, column)) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        sum.max = fmaxf(sum.max, stat[group].x);
      }
#pragma unroll
      for (int group = 0; group < kComputingWarps; ++group) {
        sum.accumulate(Partial::weight_of(stat[group].x, sum.max), stat[group].y, output[group]);
      }
      store_unit_result<Element>(job, unit, first_row + row, column, sum, *shared.sums, index);
    }
  }
};

// At the end of the block: of the lines that it shares with others, it adds up those whose last part is its own. Counting parts waits
// for all that the multiprocessor has on its way, and now there is nothing.
template <class Element>
__device__ __forceinline__ void add_up_shared_lines(const Job& job, const Role& role, Control& control, int lines) {
  role.meet();  // thread 0 has noted the lines
  const int warp = warp_index();
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
      const int row = (unit.batch * static_cast<int>(job.problem.kv_heads) + unit.kv_head) * job.cut.rows + first_row + index / quads;
      const int64_t first_part = int64_t{row} * job.cut.chunks + unit.chunk - unit.ordinal;
      store_result(job.problem, output_row<Element>(job.problem, row), row, column, job.partials.line_sum(unit, first_part, quads, column));
    }
  }
}

}  // namespace onnx_attn::decode
