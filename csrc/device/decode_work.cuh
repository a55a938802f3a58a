// decode_work.cuh: units of decode work, a chunk of keys for the query rows of one kv head, shared out among blocks by the lengths on the
// device.
#pragma once

#include "../kernels/decode_limits.h"
#include "../key_range.h"

namespace onnx_attn::decode {

// The keys of one batch entry that some query row can see, and the chunks that hold them.
struct EntryKeys {
  int begin = 0, end = 0;
  int first_chunk = 0;
  int chunks = 1;  // an entry without keys has one, in which its zeros are written
};

__device__ __forceinline__ EntryKeys entry_keys(const Problem& problem, int chunk_shift, int batch) {
  const RowPosition position = row_position(problem.mask, batch, problem.q_len, problem.kv_len);
  const KeyRange visible = visible_keys(problem.mask, position, 0, problem.q_len);
  EntryKeys keys;
  if (visible.begin >= visible.end) return keys;
  keys.begin = static_cast<int>(visible.begin);
  keys.end = static_cast<int>(visible.end);
  keys.first_chunk = keys.begin >> chunk_shift;
  keys.chunks = ((keys.end - 1) >> chunk_shift) - keys.first_chunk + 1;
  return keys;
}

struct Unit {
  int batch, kv_head, row_block;
  int line;
  int chunk;         // counted from key 0
  int ordinal;       // counted from the first chunk of the batch entry
  int entry_chunks;  // of its batch entry: a unit that is the only one writes the final result
  bool ends_run;     // the last chunk that the block takes of the line
  bool is_first;     // among the units of its (batch entry, kv head): this one stores appended rows
  int begin, end;    // visible keys of the chunk
};

// first_unit[b] is the number of units of the entries before b, in shared memory; filled once by the whole block.
struct UnitTable {
  int first_unit[kMaxScannedBatch + 1];

  __device__ __forceinline__ void fill(const Problem& problem, const Partition& cut) {
    const int batch_size = static_cast<int>(problem.batch);
    const int heads = static_cast<int>(problem.kv_heads) * cut.row_blocks;
    for (int batch = threadIdx.x; batch < batch_size; batch += blockDim.x) {
      first_unit[batch + 1] = entry_keys(problem, cut.chunk_shift, batch).chunks * heads;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      const int lane = threadIdx.x;
      int before = 0;
      for (int first = 0; first < batch_size; first += 32) {
        const bool exists = first + lane < batch_size;
        int units = exists ? first_unit[first + lane + 1] : 0;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
          const int earlier = __shfl_up_sync(~0u, units, distance);
          if (lane >= distance) units += earlier;
        }
        if (exists) first_unit[first + lane + 1] = before + units;
        before += __shfl_sync(~0u, units, 31);
      }
      if (lane == 0) first_unit[0] = 0;
    }
    __syncthreads();
  }
};

// Lengths differ and can be counted first: units are then numbered without gaps.
__host__ __device__ inline bool is_counted(const Problem& problem) {
  return problem.mask.lengths.data != nullptr && problem.batch <= kMaxScannedBatch;
}

// The units of one block: the chunks of every gridDim.x-th run.
struct UnitWalk {
  int index, total;  // runs
  int run;           // chunks of a run
  int in_run;        // chunks of it that have been taken
  int heads;         // kv heads times row blocks
  int batch;
  int uniform_chunks;  // of every entry; 0: the table knows

  __device__ __forceinline__ void start(const Problem& problem, const Partition& cut, const UnitTable& table, Run kind) {
    heads = static_cast<int>(problem.kv_heads) * cut.row_blocks;
    batch = 0;
    uniform_chunks = 0;
    if (is_counted(problem)) {
      total = table.first_unit[problem.batch];
    } else {  // all entries have as many chunks as entry 0; too many lengths to count: as many as the capacity, some in vain
      uniform_chunks = problem.mask.lengths.data ? cut.chunks : entry_keys(problem, cut.chunk_shift, 0).chunks;
      total = static_cast<int>(problem.batch) * heads * uniform_chunks;
    }
    run = kind == Run::line ? uniform_chunks : kind == Run::eight ? kChunksTogether : 1;
    if (run > 1) total = static_cast<int>(problem.batch) * heads * line_runs();  // without lengths
    index = blockIdx.x;
    in_run = 0;
  }

  // False when there is none left.
  __device__ __forceinline__ bool next(const Problem& problem, const Partition& cut, const UnitTable& table, Unit& unit) {
    while (index < total) {
      int ordinal;  // among the runs of the entry
      if (uniform_chunks > 0) {
        batch = index / (heads * line_runs());
        ordinal = index - batch * heads * line_runs();
      } else {
        while (index >= table.first_unit[batch + 1]) ++batch;
        ordinal = index - table.first_unit[batch];
      }
      const EntryKeys keys = entry_keys(problem, cut.chunk_shift, batch);
      const int head_runs = uniform_chunks > 0 ? line_runs() : keys.chunks;
      const int head = ordinal / head_runs, chunk = (ordinal - head * head_runs) * run + in_run;
      unit.ends_run = ++in_run == run || chunk + 1 >= keys.chunks;
      if (unit.ends_run) {
        in_run = 0;
        index += gridDim.x;
      }
      if (chunk >= keys.chunks) continue;

      unit.batch = batch;
      unit.kv_head = head / cut.row_blocks;
      unit.row_block = head - unit.kv_head * cut.row_blocks;
      unit.line = batch * heads + head;
      unit.chunk = keys.first_chunk + chunk;
      unit.ordinal = chunk;
      unit.entry_chunks = keys.chunks;
      unit.is_first = chunk == 0 && unit.row_block == 0;
      unit.begin = max(keys.begin, unit.chunk << cut.chunk_shift);
      unit.end = min(keys.end, (unit.chunk + 1) << cut.chunk_shift);
      return true;
    }
    return false;
  }

 private:
  __device__ __forceinline__ int line_runs() const { return (uniform_chunks + run - 1) / run; }
};

}  // namespace onnx_attn::decode
