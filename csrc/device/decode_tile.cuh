// decode_tile.cuh: tiles of keys and values in shared memory, the ring that they pass through, and the two ways to load one.
#pragma once

#include "decode_work.cuh"
#include "ptx_decode.cuh"

namespace onnx_attn::decode {

using device::shared_address;

__device__ __forceinline__ int lane_index() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp_index() { return __shfl_sync(~0u, threadIdx.x / 32, 0); }  // known to be uniform

// Rows of 16-bit elements as the copy engine writes them with its 128-byte swizzle: panels of 64 columns, each a sequence of
// 128-byte rows whose eight 16-byte pieces are XORed with row % 8. Eight rows of one piece then lie in different banks.
__device__ __forceinline__ uint32_t swizzled(int row, int piece, int panel_bytes) {
  return piece / 8 * panel_bytes + row * 128 + (((piece ^ row) & 7) << 4);
}

// A stage of the ring: a tile of K and the tile of V for the same keys, 16 KB each or more, which the memory system rewards.
template <int kHeadSize>
struct Stage {
  static constexpr int kKeys = kHeadSize == 64 ? 128 : 64;
  static constexpr int kPanels = kHeadSize / 64;
  static constexpr int kPanelBytes = kKeys * 128;
  static constexpr int kValues = kPanels * kPanelBytes;  // where V begins
  static constexpr int kBytes = 2 * kValues;
};

inline constexpr int kMaxStages = 12;

struct RingBarriers {
  uint64_t full[kMaxStages];
  uint64_t empty[kMaxStages];
};

// A role's place in the ring. Stages are used in turn; the parity flips with every lap.
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

struct TensorMaps {
  CUtensorMap keys, values;  // [batch, kv_heads, kv_len, head size]; boxes of Stage::kKeys rows and 64 columns
};

inline constexpr int kBulkArrivals = 1, kCopyArrivals = 32;  // at a full barrier, for each stage

// The copy engine fetches whole boxes: rows past the end of the unit come along, whatever they hold.
template <int kHeadSize>
__device__ __forceinline__ void load_stage_in_bulk(const TensorMaps& maps, const Unit& unit, int key, uint32_t stage, uint32_t full) {
  using S = Stage<kHeadSize>;
  if (lane_index() != 0) return;
  device::barrier_arrive_expecting(full, S::kBytes);
#pragma unroll
  for (int panel = 0; panel < S::kPanels; ++panel) {
    device::bulk_load(stage + panel * S::kPanelBytes, maps.keys, panel * 64, key, unit.kv_head, unit.batch, full);
  }
#pragma unroll
  for (int panel = 0; panel < S::kPanels; ++panel) {
    device::bulk_load(stage + S::kValues + panel * S::kPanelBytes, maps.values, panel * 64, key, unit.kv_head, unit.batch, full);
  }
}

// Starts copying kKeys rows from `key` on. Rows past the end and columns past the head size become zeros without being read.
template <class Element, int kHeadSize>
__device__ __forceinline__ void copy_rows(const Tensor4& tensor, int columns, const Unit& unit, int key, uint32_t target) {
  using S = Stage<kHeadSize>;
  constexpr int kPieces = kHeadSize / 8;  // of a row; each lane keeps its own
  constexpr int kRowStep = 32 / kPieces;
  const int piece = lane_index() % kPieces, first_row = lane_index() / kPieces;
  const Element* source = static_cast<const Element*>(tensor.data) + unit.batch * tensor.batch_stride + unit.kv_head * tensor.head_stride +
                          int64_t{key + first_row} * tensor.row_stride + piece * 8;
  const int rows = piece * 8 < columns ? unit.end - key : 0;
#pragma unroll 8
  for (int row = first_row; row < S::kKeys; row += kRowStep) {
    device::copy_async_16(target + swizzled(row, piece, S::kPanelBytes), source, row < rows ? 16 : 0);
    source += kRowStep * tensor.row_stride;
  }
}

template <class Element, int kHeadSize>
__device__ __forceinline__ void load_stage_by_copies(const Problem& problem, const Unit& unit, int key, uint32_t stage, uint32_t full) {
  copy_rows<Element, kHeadSize>(problem.k, static_cast<int>(problem.head_size), unit, key, stage);
  copy_rows<Element, kHeadSize>(problem.v, static_cast<int>(problem.v_head_size), unit, key, stage + Stage<kHeadSize>::kValues);
  device::barrier_arrive_after_copies(full);
}

}  // namespace onnx_attn::decode
