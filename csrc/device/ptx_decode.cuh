// ptx_decode.cuh: the instructions of the decode kernel beyond ptx_sm80.cuh and barrier.cuh: transposes, counts, dependent launches.
#pragma once

#include "barrier.cuh"
#include "ptx_sm80.cuh"

namespace onnx_attn::device {

// Element (lane / 4, 2 * (lane % 4)) and the next of an 8x8 matrix of 16-bit elements become those of its transpose.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t pair) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

// Copies `bytes` (0 ... 4) of 4 and writes zeros for the rest; what is not copied is not read.
__device__ __forceinline__ void copy_async_4(uint32_t target, const void* source, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(source), "r"(bytes) : "memory");
}

// Waits for every copy that this thread has started.
__device__ __forceinline__ void copy_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// What is read once leaves the L2 cache before anything else does.
__device__ __forceinline__ uint64_t read_once_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// As copy_async_16, under that policy.
__device__ __forceinline__ void copy_async_16_once(uint32_t target, const void* source, int bytes, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(target), "l"(source), "r"(bytes),
               "l"(policy)
               : "memory");
}

// Adds 1 to a word in global memory and returns what it was. What the block had stored before its threads met is seen by the block
// of whoever reads the new value in the same way, after its threads have met.
__device__ __forceinline__ int count_on_device(int* word) {
  int before;
  asm volatile("fence.acq_rel.gpu; atom.relaxed.gpu.global.add.u32 %0, [%1], 1; fence.acq_rel.gpu;" : "=r"(before) : "l"(word) : "memory");
  return before;
}

// The same for a number that says nothing about what else is stored.
__device__ __forceinline__ int take_on_device(int* word) {
  int before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(word) : "memory");
  return before;
}

// With programmatic dependent launch, the next kernel may take its places once every block of this one has said so, and waits
// for the results of the kernels before it inside. Before compute capability 9.0 kernels just follow each other.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace onnx_attn::device
