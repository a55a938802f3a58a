// decode.cu: launches the decode kernel and the combine kernel, and holds the latter.
#include <algorithm>
#include <map>
#include <mutex>

#include "../launch.h"
#include "combine.cuh"
#include "decode_launch.h"

namespace onnx_attn::decode {

namespace {

const void* find_kernel(const Problem& problem) {
  switch (compiled_head_size(problem)) {
    case 64: return kernel_64(problem.dtype);
    case 128: return kernel_128(problem.dtype);
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
  Job job{problem, ScoreRule(problem), cut, mask_layout(problem, cut), tuning.stages, copies_past(problem), {}};
  const int64_t rows = problem.batch * problem.q_heads * problem.q_len;
  job.partials.outputs = static_cast<float4*>(workspace);
  job.partials.stats = reinterpret_cast<float2*>(job.partials.outputs + rows * job.cut.chunks * (problem.v_head_size / 4));

  const void* kernel = find_kernel(problem);
  cudaError_t error = allow_shared_memory(kernel, device);
  if (error != cudaSuccess) return error;
  const int64_t units = problem.batch * problem.kv_heads * job.cut.row_blocks * job.cut.chunks;
  const int64_t blocks = std::min<int64_t>(units, device.sm_count);
  const int threads = 32 * (job.cut.row_tiles * job.cut.key_groups + kHelpers);
  void* arguments[] = {&job};
  error = launch_kernel(kernel, blocks, threads, shared_bytes(problem, tuning), arguments, device, stream);
  if (error != cudaSuccess || job.cut.chunks == 1) return error;

  const int lanes = combine_lanes(problem);
  const int groups = std::max((job.cut.chunks + kCombineLoads - 1) / kCombineLoads, 32 / lanes);
  const void* combine = problem.dtype == DType::f16 ? reinterpret_cast<const void*>(combine_kernel<__half>)
                                                    : reinterpret_cast<const void*>(combine_kernel<__nv_bfloat16>);
  void* combine_arguments[] = {&job};
  return launch_kernel(combine, rows, std::min(groups * lanes, kCombineThreads), 0, combine_arguments, device, stream);
}

}  // namespace onnx_attn::decode

namespace onnx_attn::cuda {

int decode(const Problem& problem, const Plan&, void* workspace, void* stream) {
  int index = 0;
  Device device;
  int error = cudaGetDevice(&index);
  if (error == cudaSuccess) error = query_device(index, &device);
  if (error != cudaSuccess) return error;
  return decode::launch(problem, decode::choose_tuning(problem, device), device, workspace, static_cast<cudaStream_t>(stream));
}

}  // namespace onnx_attn::cuda
