// split.cuh: float32 numbers as pairs of float16, for tensor cores. x / f = high + low, each rounded to nearest, keeps 22 bits of x,
// as many as two TF32 numbers would, and float16 is multiplied twice as fast.
//
// f is a power of two for each row, which brings the row's largest element to [2^14, 2^15): smaller elements lose bits only
// below 2^-39 of the largest. An infinite element becomes NaN.
#pragma once

#include "../problem.h"
#include "convert.cuh"
#include "fragment.cuh"

namespace onnx_attn::device {

inline constexpr int kSplitExponent = 14;
// Exponent fields of the smallest factors. Those of stored rows leave room for a product with a softmax weight.
inline constexpr int kLeastRowField = 47;  // 2^-80
inline constexpr int kLeastField = 1;      // 2^-126

template <int kLeast = kLeastRowField>
__device__ __forceinline__ float split_factor(float largest) {
  const int field = static_cast<int>(__float_as_uint(largest) >> 23) - kSplitExponent;
  return __uint_as_float(static_cast<uint32_t>(max(field, kLeast)) << 23);
}
__device__ __forceinline__ float inverse_factor(float factor) { return __uint_as_float((254u << 23) - __float_as_uint(factor)); }

struct SplitPair {
  uint32_t high, low;  // two neighbouring elements each
};

__device__ __forceinline__ SplitPair split_pair(float first, float second) {
  SplitPair pair;
  pair.high = pack<__half>(first, second);
  const float2 high = unpack<__half>(pair.high);
  pair.low = pack<__half>(first - high.x, second - high.y);
  return pair;
}

// Splits kRows rows of up to 64 * kPairs columns, all of them by the warp: load(row, column) returns two neighbours, which
// store(row, column, pair, factor) gets back; the factor is the same for every column of a row.
template <int kRows, int kPairs, class Load, class Store>
__device__ __forceinline__ void split_rows(Load&& load, Store&& store) {
  float2 values[kRows][kPairs];
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) values[row][i] = load(row, 64 * i + 2 * lane_index());
  }
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) largest = fmaxf(largest, fmaxf(fabsf(values[row][i].x), fabsf(values[row][i].y)));
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
    const float factor = split_factor(largest), inverse = inverse_factor(factor);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      store(row, 64 * i + 2 * lane_index(), split_pair(values[row][i].x * inverse, values[row][i].y * inverse), factor);
    }
  }
}

// Two neighbours of a row of float32, with zeros past its end and an optional bias added.
__device__ __forceinline__ float2 load_pair(const float* row, const float* bias, int column, int columns) {
  float2 pair = make_float2(0.0f, 0.0f);
  if (column < columns) pair.x = row[column] + (bias ? bias[column] : 0.0f);
  if (column + 1 < columns) pair.y = row[column + 1] + (bias ? bias[column + 1] : 0.0f);
  return pair;
}

// Splits a warp's rows of Q, kRows of them from `warp_row` of a block on; `q` and `bias` (or null) are the head's. Rows of the block that
// do not exist become zeros; the block's first and end row are read where they are needed, which spares registers.
// store(row, column, pair, factor) gets the row of the block.
template <int kRows, int kPairs, class Store>
__device__ __forceinline__ void split_queries(const Problem& problem, const float* q, const float* bias, int columns, const int& first_row,
                                              const int& end_row, int warp_row, Store&& store) {
  constexpr int kRowsAtOnce = 4;
#pragma unroll 1
  for (int first = warp_row; first < warp_row + kRows; first += kRowsAtOnce) {
    split_rows<kRowsAtOnce, kPairs>(
        [&](int row, int column) {
          const int query = first_row + first + row;
          return query < end_row ? load_pair(q + query * problem.q.row_stride, bias, column, columns) : make_float2(0.0f, 0.0f);
        },
        [&](int row, int column, const SplitPair& pair, float factor) { store(first + row, column, pair, factor); });
  }
}

}  // namespace onnx_attn::device
