// barrier.cuh: how warps of a block wait for each other without all of them stopping: barriers in shared memory, named barriers.
#pragma once

#include <cstdint>

namespace onnx_attn::device {

// A barrier in shared memory completes a phase when its arrivals, and the bytes it was told to expect, have all come. A wait
// names the parity of the phase that it waits for; on a new barrier, the phase before the first (parity 1) counts as complete.
__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}
// Arrives when all copies that this thread has started with copy_async are complete.
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t complete;
  do {
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(complete)
                 : "r"(barrier), "r"(parity)
                 : "memory");
#else
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(complete)
                 : "r"(barrier), "r"(parity)
                 : "memory");
#endif
  } while (!complete);
}

// Some warps of a block meet. 0 is __syncthreads.
__device__ __forceinline__ void meet(int named_barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(named_barrier), "r"(threads) : "memory");
}

}  // namespace onnx_attn::device
