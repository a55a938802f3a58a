// combine.cuh: adds up what the units of the decode kernel found for the same query row, where its blocks do not. One block for each row.
#pragma once

#include "decode_job.cuh"

namespace onnx_attn::decode {

inline constexpr int kCombineThreads = 256;  // at most

// Threads that share the columns of a row, four each.
__host__ __device__ inline int combine_lanes(const Problem& problem) {
  return problem.v_head_size <= 64 ? 16 : problem.v_head_size <= 128 ? 32 : 64;
}
// Threads of a block: one set of lanes for each eight chunks.
inline int combine_threads(const Problem& problem, const Partition& cut) {
  const int lanes = combine_lanes(problem), eights = (cut.chunks + kChunksTogether - 1) / kChunksTogether;
  return max(32, min(eights * lanes, kCombineThreads));
}

template <class Element>
__global__ void __launch_bounds__(kCombineThreads) combine_kernel(const __grid_constant__ Job job) {
  __shared__ float4 eight_outputs[kCombineThreads];
  __shared__ float2 eight_stats[kCombineThreads];
  device::let_next_kernel_start();
  const Problem& problem = job.problem;
  const int row = blockIdx.x, batch = row / static_cast<int>(problem.q_heads * problem.q_len);
  const int lanes = combine_lanes(problem), groups = blockDim.x / lanes;
  const int group = threadIdx.x / lanes, column = threadIdx.x % lanes * 4;
  const int quads = static_cast<int>(problem.v_head_size) / 4;
  const bool has_column = column < problem.v_head_size;
  Element* y = output_row<Element>(problem, row);
  // Before any exit: else the kernel after this one could overtake the decode kernel.
  if (problem.mask.lengths.data) device::wait_for_previous_kernel();
  const EntryKeys keys = entry_keys(problem, job.cut.chunk_shift, batch);
  const int64_t first_result = int64_t{row} * job.cut.chunks + keys.first_chunk;
  device::wait_for_previous_kernel();
  if (keys.chunks == 1) return;  // its only unit has stored the result

  Partial result;
  for (int first = 0; first < keys.chunks; first += groups * kChunksTogether) {
    const int own = first + group * kChunksTogether;
    Partial eight;
    job.partials.add_to(eight, first_result + own, 1, has_column ? keys.chunks - own : 0, 0, quads, column);
    if (groups == 1) {
      result.add(eight);
      continue;
    }
    __syncthreads();  // those of the round before have been read
    eight_outputs[threadIdx.x] = eight.output;
    eight_stats[threadIdx.x] = make_float2(eight.max, eight.sum);
    __syncthreads();
    for (int other = threadIdx.x; group == 0 && other < groups * lanes; other += lanes) {
      result.add(eight_stats[other].x, eight_stats[other].y, eight_outputs[other]);
    }
  }
  if (group == 0 && has_column) store_result(problem, y, row, column, result);
}

}  // namespace onnx_attn::decode
