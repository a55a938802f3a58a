// forward_sm90_scores.cuh: what happens to a tile of scores between the product with K and the softmax: softcap, scale, limits.
#pragma once

#include "forward_sm90_block.cuh"

namespace onnx_attn::forward_sm90_kernel {

// The kernels differ in what the loop does to scores: with all of it in one loop, plain calls would be slower.
enum class ScoreWork { none, cap, masks };

inline constexpr float kLog2e = 1.4426950408889634f;

template <class Shape>
using Scores = Accumulator<1, Shape::kKeys / 8>;

// Which keys the two rows of a lane can see, less the lane's part of a column: the first row sees [begin, end), the second
// 8 more on both sides, and neither sees `key_end` or beyond.
struct KeyLimits {
  int begin, end, key_end;

  __device__ __forceinline__ KeyLimits(const Problem& problem, const RowPosition& position, int warp_row) {
    constexpr int64_t kFar = int64_t{1} << 30;  // twice the longest sequence
    const Mask& mask = problem.mask;
    const auto near = [](int64_t key) { return static_cast<int>(max(-kFar, min(kFar, key))) - fragment_column(); };
    const int64_t key = warp_row + fragment_row(0) + position.offset;
    begin = mask.left < 0 ? near(-kFar) : near(key - mask.left);
    end = mask.right < 0 ? near(kFar) : near(key + mask.right + 1);
    const bool has_columns = mask.tensor.kind != TensorMask::Kind::none;
    key_end = near(has_columns ? min(position.length, mask.tensor.columns) : position.length);
  }

  // A select, never a sum: the score of a key past the length may be NaN.
  template <class Shape>
  __device__ __forceinline__ void replace_others(Scores<Shape>& scores, int first_key, float by) const {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int first = begin + 8 * row - first_key, last = min(end + 8 * row, key_end) - first_key;
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
template <class Shape, bool kAtEdge>
__device__ __forceinline__ void cap_scores(Scores<Shape>& scores, const ScoreTransform& transform, const KeyLimits& limits, int first_key) {
  constexpr bool kHasPolynomial = Shape::kHeadSize + Shape::kValueSize <= 256;
  if constexpr (kHasPolynomial && kAtEdge) limits.replace_others<Shape>(scores, first_key, 0.0f);
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

}  // namespace onnx_attn::forward_sm90_kernel
