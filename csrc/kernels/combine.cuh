// combine.cuh: adds up what the units of the decode kernel found for the same query row. One block for each row.
#pragma once

#include "decode_job.cuh"

namespace onnx_attn::decode {

inline constexpr int kCombineThreads = 256;  // at most
inline constexpr int kCombineLoads = 8;      // results that a thread has on the way at once

// Threads that share the columns of a row, four each.
__host__ __device__ inline int combine_lanes(const Problem& problem) {
  return problem.v_head_size <= 64 ? 16 : problem.v_head_size <= 128 ? 32 : 64;
}

// Groups of `lanes` threads take every groups-th chunk. The block's size depends on sizes only, hence so does the order of
// the additions.
template <class Element>
__global__ void __launch_bounds__(kCombineThreads) combine_kernel(const __grid_constant__ Job job) {
  __shared__ float4 group_outputs[kCombineThreads];
  __shared__ float2 group_stats[kCombineThreads];
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
  for (int first = group; first < keys.chunks; first += groups * kCombineLoads) {
    float2 stats[kCombineLoads];
    float4 outputs[kCombineLoads];
#pragma unroll
    for (int i = 0; i < kCombineLoads; ++i) {
      const int chunk = first + i * groups;
      const int64_t index = first_result + chunk;
      const bool exists = chunk < keys.chunks && has_column;
      stats[i] = exists ? job.partials.stats[index] : make_float2(-INFINITY, 0.0f);
      outputs[i] = exists ? job.partials.outputs[index * quads + column / 4] : make_float4(0, 0, 0, 0);
    }
    result.add(stats, outputs);
  }
  group_outputs[threadIdx.x] = result.output;
  group_stats[threadIdx.x] = make_float2(result.max, result.sum);
  __syncthreads();
  if (group != 0 || !has_column) return;
  for (int other = 1; other < groups; ++other) {
    const float2 stats[1] = {group_stats[other * lanes + threadIdx.x]};
    const float4 outputs[1] = {group_outputs[other * lanes + threadIdx.x]};
    result.add(stats, outputs);
  }
  store_result(problem, y, row, column, result.output, result.max, result.sum);
}

}  // namespace onnx_attn::decode
