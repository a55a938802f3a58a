// forward_sm90_block.cuh: what a thread block of the Hopper forward kernel is made of: tile sizes, shared memory, its pieces of work.
#pragma once

#include "../device/warpgroup_tile.cuh"
#include "forward_sm90_params.h"
#include "kernel_limits.h"

namespace onnx_attn::forward_sm90_kernel {

using namespace device;

enum NamedBarrier { kWholeBlock, kFirstWarpgroup };  // and one for each further warpgroup that computes

// What the loop does to scores. The kernels differ in it: with everything in one loop, plain calls would be slower.
enum class ScoreWork {
  none,   // limits alone
  cap,    // softcap
  keep,   // keys or scores are left out, padding is added: scores stay raw
  bias,   // a bias of Q's type is added, from tiles in shared memory
  masks,  // all of it
};

__host__ __device__ constexpr bool has_mask(ScoreWork work) { return work >= ScoreWork::keep; }

// kWarpgroups: that compute, each 64 query rows; one more loads.
// kHoldExponentials: see hold_exponentials; whether it helps was measured for each shape.
// kWritesScores: the call has a scores output, whose tiles leave by way of shared memory.
template <int kHeadSize_, int kValueSize_, int kKeys_, int kWarpgroups_, bool kHoldExponentials_, bool kHasMask_ = false,
          bool kWritesScores_ = false>
struct TileShape {
  static constexpr int kHeadSize = kHeadSize_;
  static constexpr int kValueSize = kValueSize_;
  static constexpr int kKeys = kKeys_;
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr bool kHoldExponentials = kHoldExponentials_;
  static constexpr bool kWritesScores = kWritesScores_;

  static constexpr int kRows = kWarpgroups * kWarpgroupRows;
  static constexpr int kThreads = (kWarpgroups + 1) * kWarpgroupThreads;
  static constexpr int kKeyPanels = (kHeadSize + 63) / 64;
  static constexpr int kValuePanels = (kValueSize + 63) / 64;
  static constexpr int kQueryBytes = kRows * kKeyPanels * kPanelBytes;
  static constexpr int kKeyBytes = kKeys * kKeyPanels * kPanelBytes;
  static constexpr int kValueBytes = kKeys * kValuePanels * kPanelBytes;
  static constexpr int kMaskBytes = kHasMask_ ? kRows * kKeys * 4 : 0;  // four tiles of bytes, two of 16-bit elements, or one of floats
  static constexpr int kScoreBytes = kWritesScores ? kRows * kKeys * 2 : 0;
  static constexpr int kControlBytes = 1024;

  static constexpr bool fits(int query_stages, int stages) {
    return query_stages * kQueryBytes + stages * (kKeyBytes + kValueBytes) + kMaskBytes + kScoreBytes + kControlBytes <= kHopperSharedBytes;
  }
  // With room for several Q the next one is loaded early, output, which leaves through Q's place, may do so at leisure, and the
  // first scores of a block are computed beside the last product of the one before. Beside tiles of scores a third Q would cost places
  // for K and V.
  static constexpr int kQueryStages = fits(3, 2) && !kWritesScores ? 3 : fits(2, 2) ? 2 : 1;
  static constexpr int kStages = fits(kQueryStages, 4) ? 4 : 2;

  static constexpr int kLoaderRegisters = kWarpgroups == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kWarpgroups == 3 ? 160 : 232;
  static_assert(kLoaderRegisters + kWarpgroups * kConsumerRegisters <= 512, "there are 512 for four threads of each warp scheduler");
  static_assert(kValueSize <= kHeadSize, "output leaves through the place of Q");
  static_assert(fits(1, 2));
};

// One thread fills a place, others empty it; each barrier completes a phase per use. `count` is the number of earlier uses.
template <int kStages>
struct RingBarriers {
  uint64_t full[kStages], free[kStages];

  __device__ __forceinline__ void init(int fillers, int readers) {
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(shared_address(&full[stage]), fillers);
      barrier_init(shared_address(&free[stage]), readers);
    }
  }
  __device__ static __forceinline__ int stage(int count) { return static_cast<int>(static_cast<uint32_t>(count) % kStages); }
  __device__ static __forceinline__ int round(int count) { return static_cast<int>(static_cast<uint32_t>(count) / kStages % 2); }
  __device__ __forceinline__ uint32_t full_barrier(int count) { return shared_address(&full[stage(count)]); }
  __device__ __forceinline__ void wait_full(int count) { barrier_wait(full_barrier(count), round(count)); }
  __device__ __forceinline__ void wait_free(int count) { barrier_wait(shared_address(&free[stage(count)]), round(count) ^ 1); }
  __device__ __forceinline__ void fill(int count) { barrier_arrive(full_barrier(count)); }
  __device__ __forceinline__ void release(int count) { barrier_arrive(shared_address(&free[stage(count)])); }
};

// A block of query rows of one head: everything that its warps must know of it.
template <class Shape>
struct alignas(16) RowBlock {
  static constexpr int kNoRow = -1;

  int batch, q_head, kv_head;
  int first_row;                      // kNoRow: there is no further block
  TileRange tiles;                    // key tiles that some of its rows visit
  TileRange own[Shape::kWarpgroups];  // that the rows of a warpgroup visit; rows past the last query visit none
  int begin, end;                     // row i of the block sees keys [begin + i, end + i), and ...
  int first_key, key_end;             // ... none outside of [first_key, key_end)
  int length;                         // valid keys: V may hold NaN past them
  int padding_begin, padding_end;     // keys outside get the filter of the padding, unless ...
  bool reads_padding;                 // ... the kept ones do not lie side by side
  bool reads_mask;                    // the tensor mask has to be looked at, score by score, ...
  bool has_mask_tiles;                // ... in tiles

  __device__ __forceinline__ TileRange own_tiles(int warpgroup) const {
    const TileRange& tiles = own[warpgroup];
    return TileRange{uniform(tiles.begin), uniform(tiles.whole_begin), uniform(tiles.whole_end), uniform(tiles.end)};
  }
};

// A tile of scores on its way out: the part of each warp in panels of 16 rows.
template <int kBytes>
struct ScorePlace {
  alignas(1024) uint8_t scores[kBytes];
};
template <>
struct ScorePlace<0> {};

// Tiles are stored in panels of 64 columns, swizzled by the bulk copies: 8 rows of 128 bytes, their 16-byte chunks permuted.
template <class Shape>
struct SharedMemory : ScorePlace<Shape::kScoreBytes> {
  alignas(1024) uint8_t queries[Shape::kQueryStages][Shape::kQueryBytes];  // and then the output
  alignas(1024) uint8_t keys[Shape::kStages][Shape::kKeyBytes];
  alignas(1024) uint8_t values[Shape::kStages][Shape::kValueBytes];
  uint8_t mask[Shape::kMaskBytes + 16];          // tiles of a tensor mask, in panels of 128-byte rows as well; an array has an element
  RingBarriers<Shape::kQueryStages> query_ring;  // its places are freed by the thread that fills them
  uint64_t output_full[Shape::kQueryStages];
  RingBarriers<Shape::kStages> key_ring, value_ring;
  RingBarriers<4> mask_ring;
  RingBarriers<4> block_ring;
  RowBlock<Shape> blocks[4];
  struct {
    int row, head, batch;
  } output_place[Shape::kQueryStages];  // of the thread that loads Q and stores the output
  float never_written;                  // hold_exponentials
};

template <class Shape, ScoreWork kScoreWork>
__device__ __forceinline__ MaskLayout mask_layout(const ForwardParams& params) {
  const int bytes = kScoreWork == ScoreWork::keep ? 1 : kScoreWork == ScoreWork::bias ? 2 : params.mask.element_bytes;
  return MaskLayout{Shape::kRows, Shape::kKeys, bytes};
}

// The ring of mask tiles, whose size depends on the type of the mask.
template <class Shape>
struct MaskRing {
  SharedMemory<Shape>& shared;
  int stage_bits, tile_bytes;

  __device__ __forceinline__ MaskRing(SharedMemory<Shape>& shared, const MaskLayout& layout)
      : shared(shared), stage_bits(layout.stage_bits()), tile_bytes(layout.tile_bytes()) {}
  __device__ __forceinline__ int stage(int count) const { return count & ((1 << stage_bits) - 1); }
  __device__ __forceinline__ int round(int count) const { return count >> stage_bits & 1; }
  __device__ __forceinline__ uint32_t tile(int count) const { return shared_address(shared.mask) + stage(count) * tile_bytes; }
  __device__ __forceinline__ uint32_t full_barrier(int count) const { return shared_address(&shared.mask_ring.full[stage(count)]); }
  __device__ __forceinline__ uint32_t free_barrier(int count) const { return shared_address(&shared.mask_ring.free[stage(count)]); }
  __device__ __forceinline__ void wait_full(int count) const { barrier_wait(full_barrier(count), round(count)); }
  __device__ __forceinline__ void wait_free(int count) const { barrier_wait(free_barrier(count), round(count) ^ 1); }
  __device__ __forceinline__ void release(int count) const { barrier_arrive(free_barrier(count)); }
};

}  // namespace onnx_attn::forward_sm90_kernel
