// decode_tile.cuh: tiles of keys and values in shared memory, the ring that they pass through, and how they are loaded.
#pragma once

#include "convert.cuh"
#include "decode_work.cuh"
#include "fragment.cuh"
#include "ptx_decode.cuh"

namespace onnx_attn::decode {

using device::lane_index;
using device::shared_address;

__device__ __forceinline__ int warp_index() { return __shfl_sync(~0u, threadIdx.x / 32, 0); }  // known to be uniform

// Rows of 16-bit elements in shared memory: panels of 64 columns, each a sequence of 128-byte rows whose eight 16-byte pieces
// are XORed with row % 8. Eight rows of one piece then lie in different banks.
__device__ __forceinline__ uint32_t swizzled(int row, int piece, int panel_bytes) {
  return piece / 8 * panel_bytes + row * 128 + (((piece ^ row) & 7) << 4);
}

// A stage of the ring: a tile of K and the tile of V for the same keys, 16 KB each or more; masks follow where there are any.
template <int kHeadSize>
struct Stage {
  static constexpr int kKeys = tile_keys(kHeadSize);
  static constexpr int kPanelBytes = kKeys * 128;
  static constexpr int kValues = kHeadSize / 64 * kPanelBytes;  // where V begins
  static constexpr int kBytes = 2 * kValues;
};

// A buffer passes between a warp that fills it and warps that use it: `full` says that it may be read, `empty` that it may be
// filled anew.
template <int kCount>
struct Handover {
  uint64_t full[kCount];
  uint64_t empty[kCount];

  __device__ __forceinline__ void init(int index, int full_arrivals, int empty_arrivals) {
    device::barrier_init(shared_address(&full[index]), full_arrivals);
    device::barrier_init(shared_address(&empty[index]), empty_arrivals);
  }
};

// A role's place in a ring of buffers. They are used in turn; the parity of a buffer's barriers flips with every lap. One register.
class RingPlace {
 public:
  __device__ __forceinline__ int index() const { return static_cast<int>(state_ >> 1); }
  __device__ __forceinline__ uint32_t parity() const { return state_ & 1; }
  __device__ __forceinline__ void advance(int count) {
    state_ += 2;
    if (index() == count) state_ = parity() ^ 1;
  }
  template <int kCount>
  __device__ __forceinline__ void wait_full(Handover<kCount>& ring) const {
    device::barrier_wait(shared_address(&ring.full[index()]), parity());
  }
  template <int kCount>
  __device__ __forceinline__ void wait_empty(Handover<kCount>& ring) const {
    device::barrier_wait(shared_address(&ring.empty[index()]), parity() ^ 1);
  }

 private:
  uint32_t state_ = 0;  // 2 * index + parity
};

// The whole warp is done with what it did to a buffer.
__device__ __forceinline__ void arrive_as_warp(uint64_t& barrier) {
  __syncwarp();
  if (lane_index() == 0) device::barrier_arrive(shared_address(&barrier));
}

// Rows that the caller appends are read where he has them, not in the cache, where some block is only just storing them.
struct NewRows {
  int first = 0;           // the key of row 0; may be negative
  int begin = 0, end = 0;  // keys that are new; none when begin >= end

  __device__ __forceinline__ NewRows(const Problem& problem, int batch) {
    const Append& append = problem.append;
    if (!append.active) return;
    const int64_t unclamped = append.first_row.data ? append.first_row.unclamped(batch) : append.past_len;
    first = static_cast<int>(max(-append.new_len, min(unclamped, problem.kv_len)));
    begin = max(0, first);
    end = static_cast<int>(min(problem.kv_len, first + append.new_len));
  }
  __device__ __forceinline__ bool holds(int key) const { return key >= begin && key < end; }
  __device__ __forceinline__ bool meets(int first_key, int end_key) const { return begin < end_key && end > first_key; }
};

// Eight 16-bit elements and their bias, each sum rounded once.
template <class Element>
__device__ __forceinline__ uint4 add_bias(uint4 elements, const Element* bias) {
  auto& values = reinterpret_cast<Element(&)[8]>(elements);
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = device::convert<Element>(device::convert<float>(values[i]) + device::convert<float>(bias[i]));
  return elements;
}

// K or V, as the loader and those who store appended rows see it.
template <class Element>
struct KeyRows {
  const Tensor4& stored;  // rows that are not new: of the cache, or of the past
  const Tensor4& fresh;   // rows that are
  const Tensor4& target;  // where appended rows belong
  const Element* bias;    // of new rows, [kv_heads, columns]; or null
  int columns;

  static __device__ __forceinline__ KeyRows keys(const Problem& p, bool copies_past) {
    return {copies_past ? p.append.past_k : p.k, p.append.new_k, p.k, static_cast<const Element*>(p.k_bias), static_cast<int>(p.head_size)};
  }
  static __device__ __forceinline__ KeyRows values(const Problem& p, bool copies_past) {
    return {copies_past ? p.append.past_v : p.v, p.append.new_v, p.v, static_cast<const Element*>(p.v_bias),
            static_cast<int>(p.v_head_size)};
  }
  static __device__ __forceinline__ Element* row(const Tensor4& tensor, const Unit& unit, int row) {
    return static_cast<Element*>(tensor.data) + unit.batch * tensor.batch_stride + unit.kv_head * tensor.head_stride +
           row * tensor.row_stride;
  }
  // A 16-byte piece of a new row.
  __device__ __forceinline__ uint4 new_piece(const Unit& unit, int new_row, int piece) const {
    const uint4 elements = *reinterpret_cast<const uint4*>(row(fresh, unit, new_row) + piece * 8);
    return bias ? add_bias(elements, bias + int64_t{unit.kv_head} * columns + piece * 8) : elements;
  }
};

// How a warp goes over rows: kRowStep of them with each instruction, every lane with a 16-byte piece that it keeps.
template <int kHeadSize>
struct LanePiece {
  static constexpr int kPieces = kHeadSize / 8;  // of a row
  static constexpr int kRowStep = 32 / kPieces;

  int piece = lane_index() % kPieces, row = lane_index() / kPieces;

  // Of the lane's piece of rows `first` + row, in a tile; `first` is a multiple of kRowStep, and best a constant.
  __device__ __forceinline__ uint32_t place(int first) const {
    return piece / 8 * Stage<kHeadSize>::kPanelBytes + (first + row) * 128 + (((piece ^ row ^ first) & 7) << 4);
  }
};

// A lane's piece of the rows of K or V of a unit.
template <class Element>
struct LaneSource {
  const Element* row_0;
  int64_t row_stride;
  bool exists;  // the rows are as wide as that

  template <int kHeadSize>
  __device__ __forceinline__ LaneSource(const KeyRows<Element>& rows, const Unit& unit, const LanePiece<kHeadSize>& lane)
      : row_0(KeyRows<Element>::row(rows.stored, unit, lane.row) + lane.piece * 8),
        row_stride(rows.stored.row_stride),
        exists(lane.piece * 8 < rows.columns) {}
};

// One of the `loaders` warps that share a tile.
struct LoaderShare {
  int loader, loaders;
};

// Starts copying this warp's share of the tile of K and V from `key` on: runs of 4 KB. Rows at or past `end` and columns past the
// head size become zeros without being read.
//
// Together the loaders read a tile from one end to the other. Boxes of the copy engine ran at 0.90 of the speed of a plain read,
// whether 64 columns wide or of two panels side by side, where this ran at 0.98 (64 sequences of 2048 keys and 32 heads, arithmetic
// left out, H200, 2026-11); and it takes any strides, needs nothing from the host, and runs on compute capability 8.0.
//
// Keys and values pass through the L2 cache once. Marked so, they leave code and arguments there, which would otherwise come from memory
// anew, behind all that is on its way.
template <class Element, int kHeadSize>
__device__ __forceinline__ void copy_tile(const LaneSource<Element>& keys, const LaneSource<Element>& values, int key, int end,
                                          uint32_t stage, const LoaderShare& share) {
  using S = Stage<kHeadSize>;
  constexpr int kSteps = 8;  // instructions of a run
  const LanePiece<kHeadSize> lane;
  const uint64_t policy = device::read_once_policy();
  constexpr int kRunRows = kSteps * LanePiece<kHeadSize>::kRowStep, kRuns = S::kKeys / kRunRows;
#pragma unroll 1
  for (int run = share.loader; run < 2 * kRuns; run += share.loaders) {
    const bool is_value = run >= kRuns;
    const int first = (is_value ? run - kRuns : run) * kRunRows;
    const int64_t row_stride = is_value ? values.row_stride : keys.row_stride;
    const Element* source = (is_value ? values.row_0 : keys.row_0) + (key + first) * row_stride;
    const uint32_t target = stage + (is_value ? S::kValues : 0) + first * 128;
    const int count = (is_value ? values.exists : keys.exists) ? end - key - first - lane.row : 0;
    static_assert(kRunRows % 8 == 0, "the swizzle of a run begins anew");
#pragma unroll
    for (int row = 0; row < kRunRows; row += lane.kRowStep) {
      device::copy_async_16_once(target + lane.place(row), source, row < count ? 16 : 0, policy);
      source += lane.kRowStep * row_stride;
    }
  }
}

// The same for a tile of K or V with new rows. With a bias these are stored at once: then the caller must say so to the readers.
template <class Element, int kHeadSize>
__device__ __forceinline__ void copy_tile_with_new_rows(const KeyRows<Element>& rows, const Unit& unit, const NewRows& new_rows, int key,
                                                        uint32_t target, const LoaderShare& share) {
  const LanePiece<kHeadSize> lane;
#pragma unroll 1
  for (int first = share.loader * lane.kRowStep; first < Stage<kHeadSize>::kKeys; first += share.loaders * lane.kRowStep) {
    const int row_key = key + first + lane.row;
    const bool exists = row_key < unit.end && lane.piece * 8 < rows.columns, is_new = new_rows.holds(row_key);
    if (exists && is_new && rows.bias) {
      device::store_shared_16(target + lane.place(first), rows.new_piece(unit, row_key - new_rows.first, lane.piece));
    } else {
      const Element* source =
          is_new ? KeyRows<Element>::row(rows.fresh, unit, row_key - new_rows.first) : KeyRows<Element>::row(rows.stored, unit, row_key);
      device::copy_async_16(target + lane.place(first), source + lane.piece * 8, exists ? 16 : 0);
    }
  }
}

// Starts copying `bytes` from any address to shared memory, in words: byte i lands at target + i + (source % 4). The words at both
// ends are the allocation's own.
__device__ __forceinline__ void copy_unaligned(uint32_t target, const char* source, int bytes) {
  const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(source) % 4);
  for (int at = lane_index() * 4; at < bytes + shift; at += 32 * 4) {
    device::copy_async_4(target + at, source - shift + at, min(4, bytes + shift - at));
  }
}

}  // namespace onnx_attn::decode
