// shared_memory_limit.h: dynamic shared memory beyond 48 KB, which a kernel may have once it has been asked for on each device. Host.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace onnx_attn {

// Of a block on compute capability 8.6, 8.9 and 12.0; others have more.
inline constexpr int kLeastSharedMemory = 99 * 1024;

template <auto kKernel>
cudaError_t allow_shared_memory(int bytes) {
  static std::atomic<uint64_t> prepared{0};  // a bit for each of the first 64 devices
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (prepared.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) prepared.fetch_or(bit, std::memory_order_relaxed);
  return error;
}

}  // namespace onnx_attn
