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

  template <int kColumnTiles>
  __device__ __forceinline__ static void find_maxima(Accumulator<kRows / 2, kColumnTiles>& scores, float (&tile_max)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) tile_max[r] = scores.value[r / 2][0][r % 2 * 2];
    scores.for_each([&](float score, int row, int) { tile_max[row] = fmaxf(tile_max[row], score); });
#pragma unroll
    for (int r = 0; r < kRows; ++r) tile_max[r] = max_of_row(tile_max[r]);
  }

  // Takes note of a tile's maximum. True when the row moved its reference: earlier output is to be multiplied by the correction, which
  // otherwise is 1.
  __device__ __forceinline__ bool move(int row, float tile_max, float unit, float& correction) {
    const float rise = (tile_max - row_max[row]) * unit;  // NaN while the row is empty: it stays
    correction = 1.0f;
    if (!(rise > kSlack)) return false;
    correction = exp2_fast(-rise);
    row_max[row] = tile_max;
    row_sum[row] *= correction;
    return true;
  }

  // Takes note of a tile's scores. True when some row of the warp moved.
  template <int kColumnTiles>
  __device__ __forceinline__ bool advance(Accumulator<kRows / 2, kColumnTiles>& scores, float unit, float (&correction)[kRows]) {
    float tile_max[kRows];
    find_maxima(scores, tile_max);
    bool moved = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) moved |= move(r, tile_max[r], unit, correction[r]);
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
      has_far |= is_far(references[r]);
    }
    if (__any_sync(~0u, has_far)) bring_near(scores, references);
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

 protected:
  __device__ static __forceinline__ bool is_far(float reference) { return fabsf(reference) > kFar; }
  template <int kColumnTiles>
  __device__ __forceinline__ void bring_near(Accumulator<kRows / 2, kColumnTiles>& scores, float (&references)[kRows]) const {
    float base[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const bool far = is_far(references[r]);
      base[r] = far ? row_max[r] : 0.0f;
      references[r] = far ? 0.0f : references[r];
    }
    scores.for_each([&](float& score, int row, int) { score -= base[row]; });
  }
};

// The same for loops in which a tile that moves no reference costs nothing but its maxima and weights: what weigh() needs is kept, and a
// row that is far from 0, or empty, asks to be moved in each tile.
template <int kRows>
struct SteadySoftmax : RunningSoftmax<kRows> {
  using Base = RunningSoftmax<kRows>;

  float references[kRows];  // that weigh() subtracts
  float limit[kRows];       // a score above it asks for move_to(); -inf for rows that always do

  __device__ __forceinline__ SteadySoftmax() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      references[r] = 0.0f;
      limit[r] = -INFINITY;
    }
  }

  // True when move_to() must come before weigh(), for some row of the warp.
  template <int kColumnTiles>
  __device__ __forceinline__ bool must_move(Accumulator<kRows / 2, kColumnTiles>& scores, float (&tile_max)[kRows]) const {
    Base::find_maxima(scores, tile_max);
    bool is_above = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) is_above |= tile_max[r] > limit[r];
    return __any_sync(~0u, is_above);
  }

  // True when some row of the warp moved, as of advance().
  template <int kColumnTiles>
  __device__ __forceinline__ bool move_to(const float (&tile_max)[kRows], Accumulator<kRows / 2, kColumnTiles>& scores, float unit,
                                          float (&correction)[kRows]) {
    bool moved = false, has_far = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      moved |= Base::move(r, tile_max[r], unit, correction[r]);
      references[r] = Base::reference(r, unit);
      const bool is_far = Base::is_far(references[r]);
      limit[r] = is_far ? -INFINITY : Base::row_max[r] + Base::kSlack * reciprocal_fast(unit);
      has_far |= is_far;
    }
    if (__any_sync(~0u, has_far)) Base::bring_near(scores, references);
    return __any_sync(~0u, moved);
  }

  // Scores become weights. They are added up in pairs: where every sum waits for an exponential and for the sum before, the next
  // exponentials start late.
  template <int kColumnTiles>
  __device__ __forceinline__ void weigh(Accumulator<kRows / 2, kColumnTiles>& scores, float unit) {
    scores.for_each([&](float& score, int row, int) { score = exp2_fast(fmaf(score, unit, -references[row])); });
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
        const float* pair = &scores.value[r / 2][j][r % 2 * 2];
        Base::row_sum[r] += pair[0] + pair[1];
      }
    }
  }
};

}  // namespace onnx_attn::device
