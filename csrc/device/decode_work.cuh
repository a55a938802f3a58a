// decode_work.cuh: units of decode work, a chunk of keys for the query rows of one kv head, shared out among blocks by the lengths on the device.
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

__device__ __forceinline__ EntryKeys entry_keys(const Problem& problem, int chunk_keys, int batch) {
  const RowPosition position = row_position(problem.mask, batch, problem.q_len, problem.kv_len);
  const KeyRange visible = visible_keys(problem.mask, position, 0, problem.q_len);
  EntryKeys keys;
  if (visible.begin >= visible.end) return keys;
  keys.begin = static_cast<int>(visible.begin);
  keys.end = static_cast<int>(visible.end);
  keys.first_chunk = keys.begin / chunk_keys;
  keys.chunks = (keys.end - 1) / chunk_keys - keys.first_chunk + 1;
  return keys;
}

struct Unit {
  int batch, kv_head, row_block;
  int chunk;            // counted from key 0
  int entry_chunks;     // of its batch entry: a unit that is the only one writes the final result
  int begin, end;       // visible keys of the chunk
};

// first_unit[b] is the number of units of the entries before b, in shared memory; filled once by the whole block.
struct UnitTable {
  int first_unit[kMaxScannedBatch + 1];

  __device__ __forceinline__ void fill(const Problem& problem, const Partition& cut) {
    const int batch_size = static_cast<int>(problem.batch);
    const int heads = static_cast<int>(problem.kv_heads) * cut.row_blocks;
    for (int batch = threadIdx.x; batch < batch_size; batch += blockDim.x) {
      first_unit[batch + 1] = entry_keys(problem, cut.chunk_keys, batch).chunks * heads;
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

// The units of one block: every gridDim.x-th. Each role of the block walks over them by itself.
class UnitWalk {
 public:
  __device__ __forceinline__ UnitWalk(const Problem& problem, const Partition& cut, const UnitTable& table)
      : problem_(problem), cut_(cut), table_(table), index_(blockIdx.x), heads_(static_cast<int>(problem.kv_heads) * cut.row_blocks) {
    if (is_counted(problem)) {
      total_ = table.first_unit[problem.batch];
    } else {  // every entry is given as many chunks: those that entry 0 has, or where lengths were too many to count, those of the capacity
      uniform_chunks_ = problem.mask.lengths.data ? cut.chunks : entry_keys(problem, cut.chunk_keys, 0).chunks;
      total_ = static_cast<int>(problem.batch) * heads_ * uniform_chunks_;
    }
  }

  // False when there is none left.
  __device__ __forceinline__ bool next(Unit& unit) {
    for (; index_ < total_; index_ += gridDim.x) {
      int ordinal;  // among the units of the entry
      if (uniform_chunks_ > 0) {
        const int entry_units = heads_ * uniform_chunks_;
        batch_ = index_ / entry_units;
        ordinal = index_ - batch_ * entry_units;
      } else {
        while (index_ >= table_.first_unit[batch_ + 1]) ++batch_;
        ordinal = index_ - table_.first_unit[batch_];
      }
      const EntryKeys keys = entry_keys(problem_, cut_.chunk_keys, batch_);
      const int head_chunks = uniform_chunks_ > 0 ? uniform_chunks_ : keys.chunks;
      const int head = ordinal / head_chunks, chunk = ordinal - head * head_chunks;
      if (chunk >= keys.chunks) continue;

      unit.batch = batch_;
      unit.kv_head = head / cut_.row_blocks;
      unit.row_block = head - unit.kv_head * cut_.row_blocks;
      unit.chunk = keys.first_chunk + chunk;
      unit.entry_chunks = keys.chunks;
      unit.begin = max(keys.begin, unit.chunk * cut_.chunk_keys);
      unit.end = min(keys.end, (unit.chunk + 1) * cut_.chunk_keys);
      index_ += gridDim.x;
      return true;
    }
    return false;
  }

 private:
  const Problem& problem_;
  const Partition& cut_;
  const UnitTable& table_;
  int index_;
  int heads_;
  int total_;
  int batch_ = 0;
  int uniform_chunks_ = 0;  // 0: the table knows
};

}  // namespace onnx_attn::decode
