// ptx_sm90.cuh: the instructions of the Hopper forward kernel beyond ptx_sm80.cuh and barrier.cuh: bulk copies, warpgroup products.
#pragma once

#include <cuda.h>  // for types

#include "barrier.cuh"
#include "ptx_sm80.cuh"

namespace onnx_attn::device {

// Arrives, and tells the barrier to expect so many bytes more in its phase.
__device__ __forceinline__ void barrier_arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void publish_barriers_to_copies() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Orders this thread's ordinary accesses to shared memory before later bulk copies and warpgroup products.
__device__ __forceinline__ void publish_to_bulk_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Unlike an ordinary load it stays where it is written: many of them, hoisted together, would want a register for each float.
__device__ __forceinline__ float2 load_shared_pair(uint32_t source) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(source) : "memory");
  return value;
}
__device__ __forceinline__ uint4 load_shared_16(uint32_t source) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(source)
               : "memory");
  return value;
}
// Unlike an ordinary store of registers that were loaded one by one, it stays one access.
__device__ __forceinline__ void store_global_16(void* target, const uint4& value) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w) : "memory");
}
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// How long the L2 cache should keep what a bulk load reads.
enum class Keep : uint64_t { briefly = 0x12F0000000000000, long_ = 0x14F0000000000000 };

// Starts copying the map's box at (column, row, head, batch); what lies outside the tensor arrives as zeros.
__device__ __forceinline__ void bulk_load(uint32_t target, const CUtensorMap& map, int column, int row, int head, int batch,
                                          uint32_t barrier, Keep keep) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], "
      "%7;" ::"r"(target),
      "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(barrier), "l"(static_cast<uint64_t>(keep))
      : "memory");
}

// Starts copying a box from shared memory; what lies outside the tensor is not written. Stores of a thread form groups.
__device__ __forceinline__ void bulk_store(uint32_t source, const CUtensorMap& map, int column, int row, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%1, {%2, %3, %4, %5}], [%0];" ::"r"(source), "l"(&map), "r"(column),
               "r"(row), "r"(head), "r"(batch)
               : "memory");
}
__device__ __forceinline__ void bulk_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until shared memory may be overwritten, but for that of the latest kPending groups ...
template <int kPending = 0>
__device__ __forceinline__ void bulk_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// ... and until the stores are complete.
__device__ __forceinline__ void bulk_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Four 8x8 matrices of 16-bit elements, the mirror image of load_matrices.
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// The same value, of which ptxas then knows that all lanes have it: it may live in a uniform register, and branches on it are uniform.
__device__ __forceinline__ int uniform(int value) { return __reduce_max_sync(~0u, value); }

// The same value, of which the compiler no longer knows where it came from: what is made of it is made here, not kept in registers.
__device__ __forceinline__ uint32_t forget_origin(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Registers move between the warpgroups of a block. All four warps call; growing waits until enough have been given up.
template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Warpgroup products run asynchronously. Begin after the last ordinary access to a register that they use, commit to close a
// group, and touch no such register until the group has been waited for: ptxas would run one product at a time (C75xx).
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>  // groups that may still run
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// A product's operand in shared memory: panels of 64 16-bit columns, each row of a panel 128 bytes, swizzled as bulk loads do
// with CU_TENSOR_MAP_SWIZZLE_128B. `panel_bytes` leads to the next panel; it is not used when columns run along the depth.
// Adding bytes / 16 to a descriptor moves it.
__device__ __forceinline__ uint64_t panel_descriptor(uint32_t address, int panel_bytes) {
  constexpr uint64_t kEightRows = 1024, kSwizzle128 = 1;
  return uint64_t{(address & 0x3ffff) >> 4} | static_cast<uint64_t>(panel_bytes >> 4) << 16 | (kEightRows >> 4) << 32 | kSwizzle128 << 62;
}

// A store that never happens, since sums of exponentials are not negative. ptxas moves exponentials below the wait for a
// product that they should overlap, whatever `volatile` says; it cannot move them below a store of theirs.
__device__ __forceinline__ void hold_exponentials(float sum, uint32_t shared_word) {
  asm volatile("{ .reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p st.shared.f32 [%1], %0; }" ::"f"(sum), "r"(shared_word) : "memory");
}

}  // namespace onnx_attn::device
