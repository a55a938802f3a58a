// forward_short_load.cuh: how heads come into the shared memory of a thread block.
#pragma once

#include "forward_short_keys.cuh"

namespace onnx_attn::forward_short_kernel {

// What is known of the head in a slot.
struct HeadWork {
  uint64_t prepared, keys_full, values_full, empty;  // barriers: what is below and the key row are there; Q and K are; V is; all is done
  void* y;                                           // the head's first row of the output
  uint32_t tiles[kMostKeys / kBlockRows];            // of keys, that a block of rows visits: a TileRange, a byte for each
  KeyLimits limits;
  int head;        // of all
  int has_addend;  // something has to be added to the scores of a key, or they have to be scaled
};
static_assert(kMostSlots * sizeof(HeadWork) <= kControlBytes);

__device__ __forceinline__ uint32_t pack_tiles(const TileRange& tiles) {
  return tiles.begin | min(tiles.whole_begin, 255) << 8 | tiles.whole_end << 16 | tiles.end << 24;
}
__device__ __forceinline__ TileRange unpack_tiles(uint32_t packed) {
  const auto byte = [&](int i) { return static_cast<int>(packed >> 8 * i & 255); };
  return TileRange{byte(0), byte(1), byte(2), byte(3)};
}

// Where a warp is among the slots.
struct SlotCursor {
  int slot = 0;
  uint32_t parity = 0;  // of the phase in which the slot is used

  __device__ __forceinline__ void advance(int slots) {
    const bool wraps = slot + 1 == slots;
    slot = wraps ? 0 : slot + 1;
    parity ^= wraps;
  }
};

// The shared memory of a thread block: slots, then what is known of their heads.
template <class Shape>
struct Block {
  uint8_t* bytes;
  const HeadLayout layout;
  HeadWork* const work;

  __device__ __forceinline__ Block(uint8_t* bytes, const BlockPlan& plan)
      : bytes(bytes),
        layout{Shape::kHeadSize, plan.layout.row_blocks, plan.layout.tiles},
        work(reinterpret_cast<HeadWork*>(bytes + plan.slots * layout.bytes())) {}

  __device__ __forceinline__ uint32_t place(int slot) const { return shared_address(bytes) + slot * layout.bytes(); }
};

inline constexpr int kCopyWarps = 3;  // of the last warpgroup; its fourth warp prepares

// Whose turn it is to copy the next 64 rows.
struct CopyTurn {
  int warp, next = 0;

  // Starts copying 64 rows after another into blocks of kRows rows; rows at or past `end` are not read and become zeros.
  template <int kPanels, int kRows, class Element>
  __device__ __forceinline__ void copy_rows(uint32_t target, const Element* source, int64_t row_stride, int first, int last, int end,
                                            int columns) {
    constexpr int kChunks = 8, kStep = 32 / kChunks;  // chunks of 8 elements, in a panel
    const int chunk = lane_index() % kChunks, lane_row = lane_index() / kChunks;
    target += lane_row * kPanelBytes + (chunk ^ lane_row) * 16;
    source += lane_row * row_stride + chunk * 8;
#pragma unroll 1
    for (int row = first; row < last; row += kWarpgroupRows) {
      const bool is_mine = next == warp;
      next = next + 1 == kCopyWarps ? 0 : next + 1;
      if (!is_mine) continue;
      const uint32_t place = target + (row + row / kRows * ((kPanels - 1) * kRows)) * kPanelBytes;
      const Element* element = source + row * row_stride;
      const int rows = end - row - lane_row;  // that are left for this lane
#pragma unroll 1
      for (int i = 0; i < kWarpgroupRows; i += 4 * kStep) {  // unrolled further, it would want a register for each row's place
#pragma unroll
        for (int j = i; j < i + 4 * kStep; j += kStep, element += kStep * row_stride) {
#pragma unroll
          for (int panel = 0; panel < kPanels; ++panel) {
            const bool exists = j < rows && panel * 64 + chunk * 8 < columns;
            const uint32_t swizzled = place ^ (j - i) % 8 * 16;  // chunks trade places by the row's number in eight
            copy_async_16(swizzled + (panel * kRows + j) * kPanelBytes, element + panel * 64, exists ? 16 : 0);
          }
        }
      }
    }
  }
};

// Brings Q, K and V of all heads, a head's own bytes first.
template <class Element, class Shape>
__device__ __forceinline__ void copy_heads(const Block<Shape>& block, const ForwardParams& params) {
  const Problem& problem = params.problem;
  const HeadLayout& layout = block.layout;
  const int q_len = static_cast<int>(problem.q_len);
  CopyTurn turn{static_cast<int>(threadIdx.x % kWarpgroupThreads / 32)};
  SlotCursor at;
  int free_slots = params.plan.slots;
#pragma unroll 1
  for (int head = blockIdx.x; head < params.plan.heads; head += params.plan.blocks, at.advance(params.plan.slots)) {
    const int batch = params.q_heads.divide(head), q_head = head - batch * static_cast<int>(problem.q_heads);
    const int kv_head = params.group.divide(q_head);
    HeadWork& work = block.work[at.slot];
    const uint32_t place = block.place(at.slot);
    if (--free_slots < 0) barrier_wait(shared_address(&work.empty), at.parity ^ 1);
    turn.copy_rows<Shape::kPanels, Shape::kRows>(place, head_rows<const Element>(problem.q, batch, q_head), problem.q.row_stride, 0,
                                                 layout.row_blocks * Shape::kRows, q_len, static_cast<int>(problem.head_size));
    const KeyLimits limits = KeyLimits::of_batch(params, batch);
    const TileRange tiles = limits.visited<kTileKeys>(0, q_len);
    const int visible_end = limits.visible_end(q_len);  // rows of K and V from here on may hold NaN
    const auto copy_tiles = [&](uint32_t target, const Tensor4& tensor, int64_t columns) {
      turn.copy_rows<Shape::kPanels, kTileKeys>(target, head_rows<const Element>(tensor, batch, kv_head), tensor.row_stride,
                                                tiles.begin * kTileKeys, tiles.end * kTileKeys, visible_end, static_cast<int>(columns));
    };
    copy_tiles(place + layout.keys(), problem.k, problem.head_size);
    if (head == blockIdx.x) __syncthreads();  // the barriers are made
    barrier_arrive_after_copies(shared_address(&work.keys_full));
    copy_tiles(place + layout.values(), problem.v, problem.v_head_size);
    barrier_arrive_after_copies(shared_address(&work.values_full));
  }
}

// Says what there is to do with each head.
template <class Element, class Shape, bool kHasKeyRow>
__device__ __forceinline__ void prepare_heads(const Block<Shape>& block, const ForwardParams& params) {
  const Problem& problem = params.problem;
  SlotCursor at;
#pragma unroll 1
  for (int head = blockIdx.x; head < params.plan.heads; head += params.plan.blocks, at.advance(params.plan.slots)) {
    const int batch = params.q_heads.divide(head), q_head = head - batch * static_cast<int>(problem.q_heads);
    const KeyLimits limits = KeyLimits::of_batch(params, batch);
    HeadWork& work = block.work[at.slot];
    const auto wait_for_slot = [&] {
      if (head == blockIdx.x) __syncthreads();  // the barriers are made
      barrier_wait(shared_address(&work.empty), at.parity ^ 1);
    };
    bool has_addend = params.must_scale;
    if constexpr (kHasKeyRow) {
      KeyAddends addends(problem.mask, batch, q_head, limits.key_end);
      addends.for_each([&](float value, int) { has_addend |= value != 0.0f; });
      has_addend = __any_sync(~0u, has_addend);
      wait_for_slot();
      float* key_row = reinterpret_cast<float*>(block.bytes + at.slot * block.layout.bytes() + block.layout.key_row());
      addends.for_each([&](float value, int key) {
        if (key < block.layout.tiles * kTileKeys) key_row[key] = value;
      });
    } else {
      wait_for_slot();
    }
    const int first_row = lane_index() * kBlockRows;
    if (lane_index() < block.layout.row_blocks) {
      const int end_row = min(first_row + kBlockRows, static_cast<int>(problem.q_len));
      work.tiles[lane_index()] = pack_tiles(limits.visited<kTileKeys>(first_row, end_row));
    }
    if (lane_index() == 0) {
      work.y = head_rows<Element>(problem.y, batch, q_head);
      work.limits = limits;
      work.head = head;
      work.has_addend = has_addend;
    }
    __syncwarp();
    if (lane_index() == 0) barrier_arrive(shared_address(&work.prepared));
  }
}

}  // namespace onnx_attn::forward_short_kernel
