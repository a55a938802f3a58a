// forward_sm90_scores.cuh: what happens to a tile of scores between the product with K and the softmax: softcap, limits.
#pragma once

#include "../device/softmax.cuh"
#include "forward_sm90_block.cuh"

namespace onnx_attn::forward_sm90_kernel {

inline constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// Which keys of a tile the two rows of a lane can see, less the lane's part of a column: the first row sees [begin, end), the
// second 8 more on both sides, and neither a key outside of [first_key, key_end).
struct KeyLimits {
  int begin, end, first_key, key_end;

  // `row`: of the warp, in the block. `tile_key`: the first key of the tile.
  template <class Shape>
  __device__ __forceinline__ KeyLimits(const RowBlock<Shape>& block, int row, int tile_key) {
    const int column = tile_key + fragment_column();
    begin = block.begin + row + fragment_row(0) - column;
    end = block.end + row + fragment_row(0) - column;
    first_key = block.first_key - column;
    key_end = block.key_end - column;
  }

  // A select, never a sum: the score of a key past the length may be NaN.
  template <class Shape>
  __device__ __forceinline__ void replace_others(Scores<Shape>& scores, float by) const {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int first = max(begin + 8 * row, first_key), last = min(end + 8 * row, key_end);
#pragma unroll
      for (int j = 0; j < Shape::kKeys / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores.value[0][j][2 * row + e];
          if (8 * j + e < first || 8 * j + e >= last) score = by;
        }
      }
    }
  }
};

// cap * tanh(score * slope). tanh.approx would be off by up to cap / 2000, and the exact form takes two of the slow functions
// for each score; where all of a warp's scores are small, as they usually are, a polynomial is as good and faster. Scores that do
// not count must not have a say in that, or bits would depend on what lies past the keys. With large heads products take so long
// that the exact form costs nothing, and registers are scarce.
template <class Shape>
__device__ __forceinline__ void cap_scores(Scores<Shape>& scores, const ScoreTransform& transform) {
  constexpr bool kHasPolynomial = Shape::kHeadSize + Shape::kValueSize <= 256;
  float largest = 0;
  if (kHasPolynomial) scores.for_each([&](float& score, int, int) { largest = fmaxf(largest, fabsf(score)); });
  if (kHasPolynomial && __all_sync(~0u, largest <= transform.small)) {
    const float c1 = transform.odd[0], c3 = transform.odd[1], c5 = transform.odd[2], c7 = transform.odd[3];
    scores.for_each([&](float& score, int, int) {
      const float square = score * score;
      score *= fmaf(fmaf(fmaf(c7, square, c5), square, c3), square, c1);
    });
  } else {
    const float cap = transform.cap, exponent = transform.exponent;
    scores.for_each([&](float& score, int, int) { score = fmaf(-2.0f * cap, reciprocal_fast(1.0f + exp2_fast(score * exponent)), cap); });
  }
}

// Scores become weights. kMayBeFar: a bias or a filter may have brought a whole row so far from 0 that the rounding of its reference
// decides all weights, or overflows. For such a row the difference is taken first, which is exact where scores matter.
template <bool kMayBeFar, class Shape>
__device__ __forceinline__ void weigh_scores(Scores<Shape>& scores, RunningSoftmax<2>& softmax, float unit) {
  float reference[2] = {softmax.reference(0, unit), softmax.reference(1, unit)};
  if constexpr (kMayBeFar) {
    const bool is_far[2] = {fabsf(reference[0]) > kFarReference, fabsf(reference[1]) > kFarReference};
    if (__any_sync(~0u, is_far[0] || is_far[1])) {
      const float base[2] = {is_far[0] ? softmax.row_max[0] : 0.0f, is_far[1] ? softmax.row_max[1] : 0.0f};
      scores.for_each([&](float& score, int row, int) { score -= base[row]; });
#pragma unroll
      for (int row = 0; row < 2; ++row) reference[row] = is_far[row] ? 0.0f : reference[row];
    }
  }
  scores.for_each([&](float& score, int row, int) { score = softmax.weight(score, row, unit, reference[row]); });
}

}  // namespace onnx_attn::forward_sm90_kernel
