// decode.cu: launches the decode kernel and the combine kernel, and holds the latter.
#include <algorithm>
#include <map>
#include <mutex>

#include "../launch.h"
#include "combine.cuh"
#include "decode_launch.h"

namespace onnx_attn::decode {

namespace {

const void* find_kernel(const Problem& problem, const Partition& cut) {
  switch (compiled_head_size(problem)) {
    case 64: return kernel_64(problem.dtype, cut.tile_rows);
    case 128: return kernel_128(problem.dtype, cut.tile_rows);
    default: return kernel_256(problem.dtype);
  }
}

// More than 48 KB of shared memory has to be asked for, once for each kernel and device.
cudaError_t allow_shared_memory(const void* kernel, const Device& device) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, cudaError_t> asked;
  int index = 0;
  if (const cudaError_t error = cudaGetDevice(&index); error != cudaSuccess) return error;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [entry, is_new] = asked.try_emplace({kernel, index}, cudaSuccess);
  if (is_new) {
    entry->second = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(device.max_shared_memory));
  }
  return entry->second;
}

// Counts of the parts that have been stored of each line. They are 0 between launches, since whoever counts the last part resets them.
// Launches that may run at the same time have counts of their own: one set for each stream, and one for each launch that is
// captured into a graph, which may be replayed anywhere; like the workspace, it belongs to that launch of that graph.
constexpr int kPartCounts = 1 << 19;
__device__ int part_counts[kPartCounts];

class CountPool {
 public:
  // Null when all are taken.
  cudaError_t take(int64_t lines, cudaStream_t stream, int** counts) {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    int device = 0;
    cudaError_t error = cudaStreamIsCapturing(stream, &capture);
    if (error == cudaSuccess && capture == cudaStreamCaptureStatusNone) error = cudaStreamGetId(stream, &id);
    if (error == cudaSuccess) error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    const std::lock_guard<std::mutex> lock(mutex_);
    Memory& memory = devices_[device];
    if (!memory.counts) {
      error = cudaGetSymbolAddress(reinterpret_cast<void**>(&memory.counts), part_counts);
      if (error != cudaSuccess) return error;
    }
    Range captured, &range = capture == cudaStreamCaptureStatusNone ? memory.of_streams[id] : captured;
    if (range.size < lines) {
      int64_t size = kSmallest;
      while (size < lines) size *= 2;
      if (memory.taken + size > kPartCounts) return cudaSuccess;
      range = {memory.taken, size};
      memory.taken += size;
    }
    *counts = memory.counts + range.first;
    return cudaSuccess;
  }

 private:
  static constexpr int64_t kSmallest = 32;
  struct Range {
    int64_t first = 0, size = 0;
  };
  struct Memory {
    int* counts = nullptr;
    int64_t taken = 0;
    std::map<unsigned long long, Range> of_streams;
  };
  std::mutex mutex_;
  std::map<int, Memory> devices_;
};

// With dependent launch a kernel starts while the one before it ends, and waits for its results inside.
cudaError_t launch_kernel(const void* kernel, int64_t blocks, int threads, int64_t shared_bytes, void** arguments, const Device& device,
                          cudaStream_t stream) {
  cudaLaunchAttribute dependent;
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &dependent;
  config.numAttrs = device.capability >= 90 ? 1 : 0;
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

}  // namespace

cudaError_t launch(const Problem& problem, const Tuning& tuning, const Device& device, void* workspace, cudaStream_t stream) {
  const Partition cut = partition(problem, tuning);
  Job job{problem, ScoreRule(problem), cut, tuning.run, mask_layout(problem, cut), tuning.stages, copies_past(problem), {}};
  const int64_t rows = problem.batch * problem.q_heads * problem.q_len;
  job.partials.outputs = static_cast<float4*>(workspace);
  job.partials.stats = reinterpret_cast<float2*>(job.partials.outputs + rows * job.cut.chunks * (problem.v_head_size / 4));

  const void* kernel = find_kernel(problem, cut);
  cudaError_t error = allow_shared_memory(kernel, device);
  if (error != cudaSuccess) return error;
  const int64_t lines = problem.batch * problem.kv_heads * cut.row_blocks;
  const auto count_runs = [&](Run run) {
    return run == Run::line ? lines : lines * (run == Run::one ? cut.chunks : (cut.chunks + kChunksTogether - 1) / kChunksTogether);
  };
  const bool has_parts = cut.chunks > 1 && job.run != Run::line;
  // Counting parts waits for all that the multiprocessor has on the way, 2 us and more while it loads: only for blocks at their end.
  if (has_parts && count_runs(job.run) <= device.sm_count) {
    static CountPool pool;
    if (error = pool.take(lines, stream, &job.part_counts); error != cudaSuccess) return error;
  }
  if (job.run == Run::eight && !job.part_counts) job.run = Run::one;  // the combine kernel knows chunks only
  const int64_t blocks = std::min<int64_t>(count_runs(job.run), device.sm_count);
  void* arguments[] = {&job};
  error = launch_kernel(kernel, blocks, kBlockThreads, shared_bytes(problem, tuning), arguments, device, stream);
  if (error != cudaSuccess || !has_parts || job.part_counts) return error;

  const void* combine = problem.dtype == DType::f16 ? reinterpret_cast<const void*>(combine_kernel<__half>)
                                                    : reinterpret_cast<const void*>(combine_kernel<__nv_bfloat16>);
  void* combine_arguments[] = {&job};
  return launch_kernel(combine, rows, combine_threads(problem, cut), 0, combine_arguments, device, stream);
}

}  // namespace onnx_attn::decode

namespace onnx_attn::cuda {

int decode(const Problem& problem, const Device& device, void* workspace, void* stream) {
  return decode::launch(problem, decode::choose_tuning(problem, device), device, workspace, static_cast<cudaStream_t>(stream));
}

}  // namespace onnx_attn::cuda
