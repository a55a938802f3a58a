// forward_sm90_scores.cuh: what happens to a tile of scores between the product with K and the softmax: softcap, limits.
#pragma once

#include "../device/softmax.cuh"
#include "forward_sm90_block.cuh"

namespace onnx_attn::forward_sm90_kernel {

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

  template <class Shape>
  __device__ __forceinline__ void replace_others(Scores<Shape>& scores, float by) const {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      replace_outside<Shape>(scores, row, max(begin + 8 * row, first_key), min(end + 8 * row, key_end), by);
    }
  }
};

// cap * tanh(score * slope). The exact form takes two of the slow functions for each score; where all of a warp's scores are small, as
// they usually are, a polynomial is as good and faster. Scores that do not count must not have a say in that, or bits would depend on
// what lies past the keys. With large heads products take so long that the exact form costs nothing, and registers are scarce.
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
    scores.for_each([&](float& score, int, int) { score = capped(score, exponent, cap); });
  }
}

}  // namespace onnx_attn::forward_sm90_kernel
