// forward_sm90_block.cuh: what a thread block of the Hopper forward kernel is made of: tile sizes, shared memory, its next piece of work.
#pragma once

#include "../device/fragment.cuh"
#include "../device/ptx_sm90.cuh"
#include "forward_sm90_params.h"

namespace onnx_attn::forward_sm90_kernel {

using namespace device;

inline constexpr int kMaxSharedBytes = 232448;  // of one block on compute capability 9.0
inline constexpr int kWarpgroupRows = 64;
inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kPanelBytes = 128;  // a row of a panel: 64 columns

enum NamedBarrier { kWholeBlock, kFirstWarpgroup };  // and one for each further warpgroup that computes

// kWarpgroups: that compute, each 64 query rows; one more loads.
// kHoldExponentials: see hold_exponentials; whether it helps was measured for each shape.
template <int kHeadSize_, int kValueSize_, int kKeys_, int kWarpgroups_, bool kHoldExponentials_>
struct TileShape {
  static constexpr int kHeadSize = kHeadSize_;
  static constexpr int kValueSize = kValueSize_;
  static constexpr int kKeys = kKeys_;
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr bool kHoldExponentials = kHoldExponentials_;

  static constexpr int kRows = kWarpgroups * kWarpgroupRows;
  static constexpr int kThreads = (kWarpgroups + 1) * kWarpgroupThreads;
  static constexpr int kKeyPanels = (kHeadSize + 63) / 64;
  static constexpr int kValuePanels = (kValueSize + 63) / 64;
  static constexpr int kQueryBytes = kRows * kKeyPanels * kPanelBytes;
  static constexpr int kKeyBytes = kKeys * kKeyPanels * kPanelBytes;
  static constexpr int kValueBytes = kKeys * kValuePanels * kPanelBytes;
  static constexpr int kStages = 2;
  static constexpr int kControlBytes = 1024;
  // With room for a second Q the next one is loaded early, and output, which leaves through Q's place, may do so at leisure.
  static constexpr int kQueryStages = kStages * (kKeyBytes + kValueBytes) + 2 * kQueryBytes + kControlBytes <= kMaxSharedBytes ? 2 : 1;
  static constexpr int kLoaderRegisters = kWarpgroups == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kWarpgroups == 3 ? 160 : 232;
  static_assert(kLoaderRegisters + kWarpgroups * kConsumerRegisters <= 512, "there are 512 for four threads of each warp scheduler");
  static_assert(kValueSize <= kHeadSize, "output leaves through the place of Q");
};

// One loader fills a place, all consumer warpgroups empty it; each barrier completes a phase per use.
template <int kStages>
struct RingBarriers {
  uint64_t full[kStages], free[kStages];

  __device__ __forceinline__ void init(int consumers) {
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(shared_address(&full[stage]), 1);
      barrier_init(shared_address(&free[stage]), consumers);
    }
  }
  // `count` is the number of earlier uses of the ring.
  __device__ static __forceinline__ int stage(int count) { return count % kStages; }
  __device__ static __forceinline__ int round(int count) { return count / kStages % 2; }
  __device__ __forceinline__ uint32_t full_barrier(int count) { return shared_address(&full[stage(count)]); }
  __device__ __forceinline__ void wait_full(int count) { barrier_wait(full_barrier(count), round(count)); }
  __device__ __forceinline__ void wait_free(int count) { barrier_wait(shared_address(&free[stage(count)]), round(count) ^ 1); }
  __device__ __forceinline__ void release(int count) { barrier_arrive(shared_address(&free[stage(count)])); }
};

// Tiles are stored in panels of 64 columns, swizzled by the bulk copies: 8 rows of 128 bytes, their 16-byte chunks permuted.
template <class Shape>
struct SharedMemory {
  alignas(1024) uint8_t queries[Shape::kQueryStages][Shape::kQueryBytes];  // and then the output
  alignas(1024) uint8_t keys[Shape::kStages][Shape::kKeyBytes];
  alignas(1024) uint8_t values[Shape::kStages][Shape::kValueBytes];
  RingBarriers<Shape::kQueryStages> query_ring;
  RingBarriers<Shape::kStages> key_ring, value_ring;
  RingBarriers<2> block_ring;
  int next_block[2];
  float never_written;  // hold_exponentials
};

// A block of query rows of one head and the key tiles that it visits.
template <class Shape>
struct RowBlock {
  Work work;
  RowPosition position;
  TileRange tiles;

  // Blocks are numbered in the order in which they start; see WorkOrder.
  __device__ __forceinline__ RowBlock(const ForwardParams& params, int index) {
    const Problem& problem = params.problem;
    const uint32_t band = static_cast<uint32_t>(params.order.band), row_blocks = static_cast<uint32_t>(params.order.row_blocks);
    const uint32_t first_head = index / (band * row_blocks) * band, in_band = index % (band * row_blocks);
    const uint32_t band_heads = min(static_cast<uint32_t>(params.order.heads) - first_head, band);
    const uint32_t head = first_head + in_band % band_heads, q_heads = static_cast<uint32_t>(problem.q_heads);
    work.batch = static_cast<int>(head / q_heads);
    work.q_head = static_cast<int>(head % q_heads);
    work.kv_head = static_cast<int>(head % q_heads / static_cast<uint32_t>(params.order.group));
    work.first_row = static_cast<int>(row_blocks - 1 - in_band / band_heads) * Shape::kRows;
    position = row_position(problem.mask, work.batch, problem.q_len, problem.kv_len);
    tiles = tiles_of(problem, work.first_row, Shape::kRows);
  }

  // The key tiles that some of the block's rows visit. Rows past the last query visit none.
  __device__ __forceinline__ TileRange tiles_of(const Problem& problem, int first_row, int rows) const {
    const int64_t end_row = min(int64_t{first_row} + rows, problem.q_len);
    if (first_row >= end_row) return TileRange{0, 0, 0, 0};
    const KeyRange visible = visible_keys(problem.mask, position, first_row, end_row);
    return tile_range<Shape::kKeys>(problem.mask, position, visible, first_row, end_row);
  }
};

// The number of the block that follows; `round` counts this thread's blocks. Readers of a drawn number release block_ring.
template <class Shape>
__device__ __forceinline__ int following_block(SharedMemory<Shape>& shared, const ForwardParams& params, int block, int round) {
  if (!params.next_block) return block + static_cast<int>(gridDim.x);
  shared.block_ring.wait_full(round);
  return *const_cast<volatile int*>(&shared.next_block[round % 2]);
}

}  // namespace onnx_attn::forward_sm90_kernel
