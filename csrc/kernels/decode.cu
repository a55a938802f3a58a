// decode.cu: launches the decode kernel and the combine kernel, and holds the latter.
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

// What blocks count together: those that have stored their parts of a line, or the tickets for lines that are dealt out. 0 between
// launches: whoever counts last resets them.
// Launches that may run at the same time have counts of their own: one set for each stream, and one for each launch that is
// captured into a graph, which may be replayed anywhere; like the workspace, it belongs to that launch of that graph.
constexpr int kCounters = 1 << 19;
__device__ int counters[kCounters];

class CounterPool {
 public:
  // Null when all are taken.
  cudaError_t take(int64_t wanted, cudaStream_t stream, int** taken) {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    int device = 0;
    cudaError_t error = cudaStreamIsCapturing(stream, &capture);
    if (error == cudaSuccess && capture == cudaStreamCaptureStatusNone) error = cudaStreamGetId(stream, &id);
    if (error == cudaSuccess) error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    const std::lock_guard<std::mutex> lock(mutex_);
    Memory& memory = devices_[device];
    if (!memory.counters) {
      error = cudaGetSymbolAddress(reinterpret_cast<void**>(&memory.counters), counters);
      if (error != cudaSuccess) return error;
    }
    Range captured, &range = capture == cudaStreamCaptureStatusNone ? memory.of_streams[id] : captured;
    if (range.size < wanted) {
      const int64_t size = (wanted + kUnit - 1) / kUnit * kUnit;
      if (memory.taken + size > kCounters) return cudaSuccess;
      range = {memory.taken, size};
      memory.taken += size;
    }
    *taken = memory.counters + range.first;
    return cudaSuccess;
  }

 private:
  static constexpr int64_t kUnit = 32;  // a cache line of them
  struct Range {
    int64_t first = 0, size = 0;
  };
  struct Memory {
    int* counters = nullptr;
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

// Runs the decode kernel, and the combine kernel where lines have parts that no block adds up.
cudaError_t launch(const Problem& problem, const Tuning& tuning, const Device& device, void* workspace, cudaStream_t stream) {
  const Partition cut = partition(problem, tuning);
  const void* kernel = find_kernel(problem, cut);
  cudaError_t error = allow_shared_memory(kernel, device);
  if (error != cudaSuccess) return error;

  Shares shares = share_out(problem, cut, tuning);
  const bool adds_up = may_add_up(cut.rows, compiled_head_size(problem)), deals = shares.dealing.grain > 0;
  // Blocks that do not add up would have parts of several lines to count where they take several chunks.
  const bool counts_parts = shares.makes_parts && (adds_up || shares.chunks <= shares.blocks);
  int* counted = nullptr;  // null: no counters are needed, or none are left
  if (counts_parts || deals) {
    static CounterPool pool;
    if (error = pool.take(deals ? 1 : shares.blocks, stream, &counted); error != cudaSuccess) return error;
    if (deals && !counted) shares = share_out(problem, cut, tuning, false);
  }
  Job job{problem, ScoreRule(problem), cut, shares.dealing, adds_up, mask_layout(problem, cut), tuning.stages, copies_past(problem), {}};
  const int64_t rows = problem.batch * problem.q_heads * problem.q_len;
  job.partials.outputs = static_cast<float4*>(workspace);
  job.partials.stats = reinterpret_cast<float2*>(job.partials.outputs + rows * job.cut.chunks * (problem.v_head_size / 4));
  (deals ? job.tickets : job.part_counts) = counted;
  if (shares.makes_parts && !job.part_counts) job.adds_up = false;  // the combine kernel knows chunks only
  void* arguments[] = {&job};
  error = launch_kernel(kernel, shares.blocks, kBlockThreads, shared_bytes(problem, tuning), arguments, device, stream);
  if (error != cudaSuccess || !shares.makes_parts || job.part_counts) return error;

  const void* combine = problem.dtype == DType::f16 ? reinterpret_cast<const void*>(combine_kernel<__half>)
                                                    : reinterpret_cast<const void*>(combine_kernel<__nv_bfloat16>);
  void* combine_arguments[] = {&job};
  return launch_kernel(combine, rows, combine_threads(problem, cut), 0, combine_arguments, device, stream);
}

}  // namespace

}  // namespace onnx_attn::decode

namespace onnx_attn::cuda {

int decode(const Problem& problem, const Device& device, void* workspace, void* stream) {
  return decode::launch(problem, decode::choose_tuning(problem, device), device, workspace, static_cast<cudaStream_t>(stream));
}

}  // namespace onnx_attn::cuda
