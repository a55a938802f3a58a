// softmax.cuh: the running maximum and sum of a softmax that sees its row a tile at a time, in base 2.
#pragma once

#include "base_2.cuh"
#include "fragment.cuh"

namespace onnx_attn::device {

// The weight of score s is 2^(s * unit - reference), where reference is the row's maximum, or one up to kSlack binary
// orders below it: moving the reference costs a multiplication of every output element, and the quotient in which the
// softmax ends does not depend on it. Weights up to 2^kSlack fit every 16-bit type.
template <int kRows>
struct RunningSoftmax {
  static constexpr float kSlack = 8.0f;
  // Weights of a row share the rounding error of its reference. Up to here it is 2^-11, less than a 16-bit weight's own; at 2^28 the
  // weights would leave the range of float16, at 2^31 that of float.
  static constexpr float kFar = 16384.0f;

  float row_max[kRows];  // in scores; the one that the reference was made from. -inf: no allowed key yet
  float row_sum[kRows];  // of this lane's columns until finish()

  __device__ __forceinline__ RunningSoftmax() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      row_max[r] = -INFINITY;
      row_sum[r] = 0.0f;
    }
  }

  // Takes note of a tile's scores. True when some row of the warp moved its reference: earlier output is to be multiplied
  // by correction[row], which is 1 for the rows that did not move.
  template <int kColumnTiles>
  __device__ __forceinline__ bool advance(Accumulator<kRows / 2, kColumnTiles>& scores, float unit, float (&correction)[kRows]) {
    float tile_max[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) tile_max[r] = row_max[r];
    scores.for_each([&](float score, int row, int) { tile_max[row] = fmaxf(tile_max[row], score); });
    bool moved = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      tile_max[r] = max_of_row(tile_max[r]);
      const float rise = (tile_max[r] - row_max[r]) * unit;  // NaN while the row is empty: it stays
      correction[r] = 1.0f;
      if (rise > kSlack) {
        correction[r] = exp2_fast(-rise);
        row_max[r] = tile_max[r];
        row_sum[r] *= correction[r];
        moved = true;
      }
    }
    return __any_sync(~0u, moved);
  }

  // Zero for an empty row, so that its -inf scores get weight 0 and not NaN.
  __device__ __forceinline__ float reference(int row, float unit) const { return row_max[row] == -INFINITY ? 0.0f : row_max[row] * unit; }

  // What weight() subtracts. Scores of a row far from 0 become differences first, exact where they matter, and its reference 0.
  template <int kColumnTiles>
  __device__ __forceinline__ void find_references(Accumulator<kRows / 2, kColumnTiles>& scores, float unit,
                                                  float (&references)[kRows]) const {
    bool has_far = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      references[r] = reference(r, unit);
      has_far |= fabsf(references[r]) > kFar;
    }
    if (__any_sync(~0u, has_far)) {
      float base[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const bool is_far = fabsf(references[r]) > kFar;
        base[r] = is_far ? row_max[r] : 0.0f;
        references[r] = is_far ? 0.0f : references[r];
      }
      scores.for_each([&](float& score, int row, int) { score -= base[row]; });
    }
  }

  __device__ __forceinline__ float weight(float score, int row, float unit, float reference) {
    const float weight = exp2_fast(fmaf(score, unit, -reference));
    row_sum[row] += weight;
    return weight;
  }

  // Adds the four lanes of each row. Call once, after the last tile.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) row_sum[r] = sum_of_row(row_sum[r]);
  }
  __device__ __forceinline__ bool is_empty(int row) const { return row_sum[row] == 0.0f; }  // a largest score has weight >= 1
  __device__ __forceinline__ float inverse_sum(int row) const { return is_empty(row) ? 0.0f : 1.0f / row_sum[row]; }
  __device__ __forceinline__ float log_sum_exp(int row, float unit) const {  // natural
    return is_empty(row) ? -INFINITY : (row_max[row] * unit + log2f(row_sum[row])) * kLn2;
  }
};

}  // namespace onnx_attn::device
