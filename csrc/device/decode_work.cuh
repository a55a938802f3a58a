// decode_work.cuh: units of decode work, a chunk of keys for the query rows of one kv head, shared out among blocks by the lengths on the
// device.
#pragma once

#include "../kernels/decode_limits.h"

namespace onnx_attn::decode {

struct Unit {
  int batch, kv_head, row_block;
  int chunk;         // counted from key 0
  int ordinal;       // counted from the first chunk of the batch entry
  int entry_chunks;  // of its batch entry: a unit that is the only one writes the final result
  bool ends_share;   // the last one of what the block began with, or was dealt
  bool is_first;     // among the units of its (batch entry, kv head): this one stores appended rows
  int begin, end;    // visible keys of the chunk

  // Ordinals of the line: those that the block takes, and where others take over, from `first_cut` on.
  int run_begin, run_end;
  int first_cut, cut_step;
  int first_block;  // that has chunks of the line: no two lines that have several blocks have it in common

  __device__ __forceinline__ bool ends_run() const { return ordinal + 1 == run_end; }
  __device__ __forceinline__ bool has_whole_line() const { return run_begin == 0 && run_end == entry_chunks; }
  __device__ __forceinline__ int first_of_eight() const { return ordinal / kChunksTogether * kChunksTogether; }
  __device__ __forceinline__ int line_blocks() const { return 1 + (entry_chunks - 1 - first_cut + cut_step) / cut_step; }
};

// first_unit[b] is the number of units of the entries before b, in shared memory; filled once by the whole block.
struct UnitTable {
  int first_unit[kMaxScannedBatch + 1];
  int longest_line;

  __device__ __forceinline__ void fill(const Problem& problem, const Partition& cut) {
    const int batch_size = static_cast<int>(problem.batch);
    const int heads = static_cast<int>(problem.kv_heads) * cut.row_blocks;
    for (int batch = threadIdx.x; batch < batch_size; batch += blockDim.x) {
      first_unit[batch + 1] = entry_keys(problem, cut.chunk_shift, batch).chunks * heads;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      const int lane = threadIdx.x;
      int before = 0, longest = 1;
      for (int first = 0; first < batch_size; first += 32) {
        const bool exists = first + lane < batch_size;
        int units = exists ? first_unit[first + lane + 1] : 0;
        longest = max(longest, units / heads);
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
          const int earlier = __shfl_up_sync(~0u, units, distance);
          if (lane >= distance) units += earlier;
        }
        if (exists) first_unit[first + lane + 1] = before + units;
        before += __shfl_sync(~0u, units, 31);
      }
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) longest = max(longest, __shfl_xor_sync(~0u, longest, distance));
      if (lane == 0) {
        first_unit[0] = 0;
        longest_line = longest;
      }
    }
    __syncthreads();
  }
};

// Lengths differ and can be counted first: units are then numbered without gaps.
__host__ __device__ inline bool is_counted(const Problem& problem) {
  return problem.mask.lengths.data != nullptr && problem.batch <= kMaxScannedBatch;
}

// The units of one block: its share of the list of chunks, then what it is dealt.
struct UnitWalk {
  int begin, end, index;  // of the list
  int total;
  int quota, grain;
  int heads;  // kv heads times row blocks
  int batch;
  int uniform_chunks;  // of every entry; 0: the table knows

  __device__ __forceinline__ void start(const Problem& problem, const Partition& cut, const UnitTable& table, const Dealing& dealing) {
    heads = static_cast<int>(problem.kv_heads) * cut.row_blocks;
    batch = 0;
    uniform_chunks = 0;
    int longest;
    if (is_counted(problem)) {
      total = table.first_unit[problem.batch];
      longest = table.longest_line;
    } else {  // all entries have as many chunks as entry 0; too many lengths to count: as many as the capacity, some in vain
      longest = uniform_chunks = problem.mask.lengths.data ? cut.chunks : entry_keys(problem, cut.chunk_shift, 0).chunks;
      total = static_cast<int>(problem.batch) * heads * uniform_chunks;
    }
    quota = dealing.quota > 0 ? dealing.quota : choose_quota(total, longest, gridDim.x);
    grain = dealing.grain;
    begin = index = min(total, static_cast<int>(blockIdx.x) * quota);
    end = min(total, begin + quota);
  }

  // What ticket number `ticket` is for. False when nothing is left.
  __device__ __forceinline__ bool start_dealt(int ticket) {
    begin = index = static_cast<int>(gridDim.x) * quota + ticket * grain;
    end = min(total, begin + grain);
    return begin < total;
  }
  // The last that is taken: every block takes one in vain.
  __device__ __forceinline__ int last_ticket() const {
    return (total - static_cast<int>(gridDim.x) * quota + grain - 1) / grain + static_cast<int>(gridDim.x) - 1;
  }

  // False when there is none left.
  __device__ __forceinline__ bool next(const Problem& problem, const Partition& cut, const UnitTable& table, Unit& unit) {
    for (; index < end; ++index) {
      int place;  // among the chunks of the entry
      if (uniform_chunks > 0) {
        batch = index / (heads * uniform_chunks);
        place = index - batch * heads * uniform_chunks;
      } else {
        while (index >= table.first_unit[batch + 1]) ++batch;
        place = index - table.first_unit[batch];
      }
      const EntryKeys keys = entry_keys(problem, cut.chunk_shift, batch);
      const int line_chunks = uniform_chunks > 0 ? uniform_chunks : keys.chunks;
      const int head = place / line_chunks, chunk = place - head * line_chunks;
      if (chunk >= keys.chunks) continue;

      const int line_begin = index - chunk;
      unit.batch = batch;
      unit.kv_head = head / cut.row_blocks;
      unit.row_block = head - unit.kv_head * cut.row_blocks;
      unit.chunk = keys.first_chunk + chunk;
      unit.ordinal = chunk;
      unit.entry_chunks = keys.chunks;
      unit.is_first = chunk == 0 && unit.row_block == 0;
      unit.begin = max(keys.begin, unit.chunk << cut.chunk_shift);
      unit.end = min(keys.end, (unit.chunk + 1) << cut.chunk_shift);
      unit.ends_share = index + 1 == end;
      unit.run_begin = max(0, begin - line_begin);
      unit.run_end = min(keys.chunks, end - line_begin);
      unit.first_block = line_begin / quota;
      unit.first_cut = (unit.first_block + 1) * quota - line_begin;
      unit.cut_step = quota;
      ++index;
      return true;
    }
    return false;
  }
};

}  // namespace onnx_attn::decode
