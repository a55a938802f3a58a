// load_tile.cuh: rows of any floating type and any stride become a tile of the accumulation type in shared memory.
#pragma once

#include "convert.cuh"
#include "packet.cuh"

namespace onnx_attn::device {

inline constexpr int64_t kNoRow = -1;  // what row_offset returns for a row that does not exist

// tile[row][column] = data[row_offset(row) + column] for kRows x kColumns elements; zero for a missing row and for columns
// at or past `columns`. Zeros matter: what lies there may be NaN, and 0 * NaN is NaN.
// The whole block of kThreads calls it; the caller synchronises before (readers of the old tile) and after.
template <int kThreads, int kRows, int kColumns, class Accum, int kPitch, class RowOffset>
__device__ __forceinline__ void load_tile(Accum (&tile)[kRows][kPitch], const void* data, DType dtype, int64_t columns,
                                          RowOffset row_offset) {
  with_float_type(dtype, [&](auto type) {
    using Element = decltype(type);
    constexpr int kWidth = Packet<Element>::kCount;
    constexpr int kPerRow = kColumns / kWidth;
    constexpr int kPackets = kRows * kPerRow;
    constexpr int kSteps = (kPackets + kThreads - 1) / kThreads;
    constexpr int kInFlight = kSteps < 4 ? kSteps : 4;  // loads issued before the first is used; more costs registers
    static_assert(kColumns % kWidth == 0 && kSteps % kInFlight == 0);
    const Element* source = static_cast<const Element*>(data);

#pragma unroll 1
    for (int step = 0; step < kSteps; step += kInFlight) {
      Packet<Element> packets[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int index = threadIdx.x + (step + i) * kThreads;
        const int row = index / kPerRow, column = index % kPerRow * kWidth;
        const int64_t offset = index < kPackets ? row_offset(row) : kNoRow;
        packets[i] = load_packet(source + offset + column, offset == kNoRow ? 0 : columns - column);
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int index = threadIdx.x + (step + i) * kThreads;
        const int row = index / kPerRow, column = index % kPerRow * kWidth;
        if (index >= kPackets) continue;
        constexpr int kStoreWidth = Packet<Accum>::kCount < kWidth ? Packet<Accum>::kCount : kWidth;
#pragma unroll
        for (int e = 0; e < kWidth; e += kStoreWidth) {
          if constexpr (kStoreWidth == Packet<Accum>::kCount) {
            Packet<Accum> values;
#pragma unroll
            for (int v = 0; v < kStoreWidth; ++v) values.elements[v] = convert<Accum>(packets[i].elements[e + v]);
            *reinterpret_cast<Packet<Accum>*>(&tile[row][column + e]) = values;
          } else {
#pragma unroll
            for (int v = 0; v < kStoreWidth; ++v) tile[row][column + e + v] = convert<Accum>(packets[i].elements[e + v]);
          }
        }
      }
    }
  });
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
