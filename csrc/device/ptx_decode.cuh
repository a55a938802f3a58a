// ptx_decode.cuh: the instructions of the decode kernel beyond ptx_sm80.cuh: barriers in shared memory, bulk copies, dependent launches.
#pragma once

#include <cuda.h>

#include "ptx_sm80.cuh"

namespace onnx_attn::device {

// A barrier in shared memory completes a phase when its arrivals, and the bytes it was told to expect, have all come. A wait
// names the parity of the phase that it waits for; on a new barrier, the phase before the first (parity 1) counts as complete.
__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}
// Arrives when all copies that this thread has started with copy_async_16 are complete.
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

// Waits for every copy that this thread has started with copy_async_16.
__device__ __forceinline__ void copy_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void store_shared_16(uint32_t target, const uint4& value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(target), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w) : "memory");
}

__device__ __forceinline__ void prefetch_to_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// Some warps of a block meet. 0 is __syncthreads.
__device__ __forceinline__ void meet(int named_barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(named_barrier), "r"(threads) : "memory");
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

inline constexpr bool kHasBulkCopies = true;

__device__ __forceinline__ void publish_barriers_to_copies() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Orders this thread's ordinary accesses to shared memory before later bulk copies into it.
__device__ __forceinline__ void publish_to_bulk_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void barrier_arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Starts copying the map's box at (column, row, head, batch); what lies outside the tensor arrives as zeros.
__device__ __forceinline__ void bulk_load(uint32_t target, const CUtensorMap& map, int column, int row, int head, int batch,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(target),
      "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// With programmatic dependent launch, the next kernel may take its places once every block of this one has said so ...
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// ... and waits here until the kernels before it are complete and their writes are visible.
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

#else  // before compute capability 9.0 kernels follow each other, and nothing is copied in bulk

inline constexpr bool kHasBulkCopies = false;

__device__ __forceinline__ void publish_barriers_to_copies() {}
__device__ __forceinline__ void publish_to_bulk_copies() {}
__device__ __forceinline__ void barrier_arrive_expecting(uint32_t, int) {}
__device__ __forceinline__ void bulk_load(uint32_t, const CUtensorMap&, int, int, int, int, uint32_t) {}
__device__ __forceinline__ void prefetch_map(const CUtensorMap&) {}
__device__ __forceinline__ void let_next_kernel_start() {}
__device__ __forceinline__ void wait_for_previous_kernel() {}

#endif

}  // namespace onnx_attn::device
