// device_query.cu: what the planner needs to know of a CUDA device, asked once for each device.
#include <cuda_runtime.h>

#include <map>
#include <mutex>

#include "../launch.h"

namespace onnx_attn::cuda {

namespace {

cudaError_t ask(int index, Device* device) {
  int major = 0, minor = 0, sm_count = 0, shared_memory = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, index);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
  if (error != cudaSuccess) {
    cudaGetLastError();  // the caller has the error; do not leave it for the next launch to find
    return error;
  }
  device->is_cuda = true;
  device->capability = major * 10 + minor;
  device->sm_count = sm_count;
  device->max_shared_memory = shared_memory;
  return cudaSuccess;
}

}  // namespace

int query_device(int index, Device* device) {
  static std::mutex mutex;
  static std::map<int, Device> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(index);
  if (found != known.end()) {
    *device = found->second;
    return cudaSuccess;
  }
  Device answer;
  const cudaError_t error = ask(index, &answer);
  if (error != cudaSuccess) return error;
  known[index] = answer;
  *device = answer;
  return cudaSuccess;
}

const char* error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

}  // namespace onnx_attn::cuda
