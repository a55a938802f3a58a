// load_tile.cuh: rows of any floating type and any stride become a tile of the accumulation type in shared memory.
#pragma once

#include "convert.cuh"
#include "packet.cuh"

namespace onnx_attn::device {

inline constexpr int64_t kNoRow = -1;  // what row_offset returns for a row that does not exist

// The next 16 bytes of a row whose elements have 2, 4 or 8 bytes; elements at or past `count` are zero.
__device__ __forceinline__ uint4 load_bytes(const void* data, int size, int64_t offset, int64_t count) {
  const auto load = [&](auto type) {
    const auto packet = load_packet(static_cast<const decltype(type)*>(data) + offset, count);
    return reinterpret_cast<const uint4&>(packet);
  };
  if (size == 2) return load(uint16_t());
  if (size == 4) return load(uint32_t());
  return load(uint64_t());
}

// Writes the elements of a packet at `target`, which stands on a 16-byte boundary if Accum is no narrower than the element.
template <class Accum>
__device__ __forceinline__ void store_converted(Accum* target, const uint4& bytes, DType dtype) {
  with_float_type(dtype, [&](auto type) {
    using Element = decltype(type);
    const auto& elements = reinterpret_cast<const Packet<Element>&>(bytes).elements;
    constexpr int kCount = Packet<Element>::kCount, kStore = Packet<Accum>::kCount;
    if constexpr (kCount < kStore) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) target[e] = convert<Accum>(elements[e]);
    } else {
#pragma unroll
      for (int e = 0; e < kCount; e += kStore) {
        Packet<Accum> values;
#pragma unroll
        for (int v = 0; v < kStore; ++v) values.elements[v] = convert<Accum>(elements[e + v]);
        *reinterpret_cast<Packet<Accum>*>(target + e) = values;
      }
    }
  });
}

// tile[row][column] = data[row_offset(row) + column] for kRows x kColumns elements; zero for a missing row and for columns
// at or past `columns`. Zeros matter: what lies there may be NaN, and 0 * NaN is NaN.
// The whole block of kThreads calls it; the caller synchronises before (readers of the old tile) and after.
//
// Loads know only the size of an element and conversions only its type, with the switches inside: a copy of the loop for each
// type would keep its addresses in registers all the time.
template <int kThreads, int kRows, int kColumns, class Accum, int kPitch, class RowOffset>
__device__ __forceinline__ void load_tile(Accum (&tile)[kRows][kPitch], const void* data, DType dtype, int64_t columns,
                                          RowOffset row_offset) {
  constexpr int kInFlight = 4;  // loads issued before the first is used
  static_assert((kColumns & (kColumns - 1)) == 0);
  const int size = float_bytes(dtype);
  const int shift = size == 8 ? 1 : size == 4 ? 2 : 3;                                     // log2 of the elements in a packet
  const auto row_of = [&](int index) { return index >> (31 - __clz(kColumns) - shift); };  // packets never straddle two rows
  const auto column_of = [&](int index) { return (index << shift) & (kColumns - 1); };
  const int packets = kRows * kColumns >> shift;

#pragma unroll 1
  for (int first = threadIdx.x; first < packets; first += kInFlight * kThreads) {
    uint4 bytes[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int index = first + i * kThreads;
      const int column = column_of(index);
      const int64_t offset = index < packets ? row_offset(row_of(index)) : kNoRow;
      bytes[i] = load_bytes(data, size, offset + column, offset == kNoRow ? 0 : columns - column);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int index = first + i * kThreads;
      if (index < packets) store_converted(&tile[row_of(index)][column_of(index)], bytes[i], dtype);
    }
  }
}

// Adds bias[column] to every row of a loaded tile that exists. The caller synchronises before and after.
template <int kThreads, int kRows, int kColumns, class Accum, int kPitch, class RowOffset>
__device__ __forceinline__ void add_row_bias(Accum (&tile)[kRows][kPitch], const void* bias, DType dtype, int64_t columns,
                                             RowOffset row_offset) {
  with_float_type(dtype, [&](auto type) {
    using Element = decltype(type);
#pragma unroll 1
    for (int index = threadIdx.x; index < kRows * kColumns; index += kThreads) {
      const int row = index / kColumns, column = index % kColumns;
      if (column < columns && row_offset(row) != kNoRow) tile[row][column] += convert<Accum>(static_cast<const Element*>(bias)[column]);
    }
  });
}

}  // namespace onnx_attn::device
