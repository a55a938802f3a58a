// decode.cu: launches the decode kernel and the combine kernel, and holds the latter.
#include <cuda.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "../launch.h"
#include "combine.cuh"
#include "decode_launch.h"

namespace onnx_attn::decode {

namespace {

// The map of a K or V tensor: axes column, row, head, batch; boxes of one panel of one tile.
bool make_tensor_map(const Problem& problem, const Tensor4& tensor, int64_t rows, int64_t columns, int box_rows, CUtensorMap* map) {
  static const auto encode = [] {  // from the driver, without linking it
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)
                                                                        : nullptr;
  }();
  if (!encode) return false;
  const auto bytes = [](int64_t stride, int64_t extent) {
    return static_cast<cuuint64_t>(extent > 1 ? stride * 2 : 16);
  };  // unused at extent 1
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(problem.kv_heads),
                               static_cast<cuuint64_t>(problem.batch)};
  const cuuint64_t strides[3] = {bytes(tensor.row_stride, rows), bytes(tensor.head_stride, problem.kv_heads),
                                 bytes(tensor.batch_stride, problem.batch)};
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(box_rows), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const auto type = problem.dtype == DType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return encode(map, type, 4, tensor.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

const void* find_kernel(const Problem& problem, bool bulk_copies) {
  switch (compiled_head_size(problem)) {
    case 64: return kernel_64(problem.dtype, bulk_copies);
    case 128: return kernel_128(problem.dtype, bulk_copies);
    default: return kernel_256(problem.dtype, bulk_copies);
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
  Job job{problem, ScoreRule(problem), partition(problem, tuning), tuning.stages, copies_past(problem), tuning.box_rows, {}};
  const int64_t rows = problem.batch * problem.q_heads * problem.q_len;
  job.partials.outputs = static_cast<float4*>(workspace);
  job.partials.stats = reinterpret_cast<float2*>(job.partials.outputs + rows * job.cut.chunks * (problem.v_head_size / 4));

  TensorMaps maps = {};
  const Tensor4& stored_k = job.copies_past ? problem.append.past_k : problem.k;
  const Tensor4& stored_v = job.copies_past ? problem.append.past_v : problem.v;
  const int64_t stored_rows = job.copies_past ? problem.append.past_len : problem.kv_len;
  const bool bulk_copies = tuning.bulk_copies &&
                           make_tensor_map(problem, stored_k, stored_rows, problem.head_size, tuning.box_rows, &maps.keys) &&
                           make_tensor_map(problem, stored_v, stored_rows, problem.v_head_size, tuning.box_rows, &maps.values);

  const void* kernel = find_kernel(problem, bulk_copies);
  cudaError_t error = allow_shared_memory(kernel, device);
  if (error != cudaSuccess) return error;
  const int64_t units = problem.batch * problem.kv_heads * job.cut.row_blocks * job.cut.chunks;
  const int64_t blocks = std::min<int64_t>(units, int64_t{device.sm_count} * tuning.blocks_per_sm);
  const int threads = 32 * (job.cut.row_tiles * job.cut.key_groups + kHelpers);
  void* arguments[] = {&job, &maps};
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
