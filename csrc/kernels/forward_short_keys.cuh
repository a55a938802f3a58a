// forward_short_keys.cuh: which keys the rows of a head can see, and what masks add to the scores of each.
#pragma once

#include "../device/block_work.cuh"
#include "../device/warpgroup_tile.cuh"
#include "forward_short_params.h"

namespace onnx_attn::forward_short_kernel {

using namespace device;

// What a tensor mask without a query axis and the key padding add to the scores of this lane's keys, lane + 32 * j; -inf excludes a key.
// Types are told apart outside of the loops, so that the accesses of a lane are on their way together.
struct KeyAddends {
  float value[kMostKeys / 32] = {};

  template <class Body>
  __device__ __forceinline__ void for_each(Body&& body) {
#pragma unroll
    for (int j = 0; j < kMostKeys / 32; ++j) body(value[j], lane_index() + 32 * j);
  }

  __device__ __forceinline__ KeyAddends(const Mask& mask, int batch, int q_head, int key_end) {
    const TensorMask& tensor = mask.tensor;
    const int64_t row = batch * tensor.batch_stride + q_head * tensor.head_stride;
    if (tensor.kind == TensorMask::Kind::keep) {
      const bool* data = static_cast<const bool*>(tensor.data) + row;
      for_each([&](float& value, int key) {
        if (key < min(static_cast<int64_t>(key_end), tensor.columns)) value = data[key * tensor.key_stride] ? 0.0f : -INFINITY;
      });
    } else if (tensor.kind == TensorMask::Kind::bias) {
      with_float_type(tensor.dtype, [&](auto type) {
        const auto* data = static_cast<const decltype(type)*>(tensor.data) + row;
        for_each([&](float& value, int key) {
          if (key < min(static_cast<int64_t>(key_end), tensor.columns)) value = bias_as_float(data[key * tensor.key_stride]);
        });
      });
    }
    const Padding& padding = mask.padding;
    if (padding.kind == Padding::Kind::none) return;
    with_integer_type(padding.dtype, [&](auto type) {
      const auto* data = static_cast<const decltype(type)*>(padding.data) + batch * padding.batch_stride;
      if (padding.kind == Padding::Kind::lengths) {
        const int64_t length = static_cast<int64_t>(*data);
        for_each([&](float& value, int key) {
          if (key < key_end && key >= length) value += padding.filter;
        });
      } else {
        for_each([&](float& value, int key) {
          if (key < key_end && !(key < padding.columns && data[key * padding.key_stride] > 0)) value += padding.filter;
        });
      }
    });
  }
};

// score * scale + addend. A select: the score of an excluded key may be NaN.
template <class Shape>
__device__ __forceinline__ void add_key_row(Scores<Shape>& scores, uint32_t key_row, float scale) {
  key_row += fragment_column() * 4;
#pragma unroll
  for (int j = 0; j < Shape::kKeys / 8; ++j) {
    const float2 addend = load_shared_pair(key_row + 32 * j);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float* score = &scores.value[0][j][2 * row];
      score[0] = fmaf(score[0], scale, addend.x);
      score[1] = fmaf(score[1], scale, addend.y);
      if (addend.x == -INFINITY) score[0] = -INFINITY;
      if (addend.y == -INFINITY) score[1] = -INFINITY;
    }
  }
}

// Which keys the rows of a head can see: row i sees [begin + i, end + i), and none from key_end on.
struct KeyLimits {
  int begin, end, key_end;

  __device__ static __forceinline__ KeyLimits of_batch(const ForwardParams& params, int batch) {
    const Mask& mask = params.problem.mask;
    const int length = static_cast<int>(mask.lengths.at(batch, params.problem.kv_len));
    const int offset = mask.offset_follows_length ? length - static_cast<int>(params.problem.q_len) : 0;
    return KeyLimits{params.begin + offset, params.end + offset, min(length, params.columns)};
  }

  // See TileRange.
  template <int kKeys>
  __device__ __forceinline__ TileRange visited(int first_row, int end_row) const {
    const int first = max(0, begin + first_row), last = visible_end(end_row);
    if (first >= last) return TileRange{0, 0, 0, 0};
    const int whole_begin = max(0, begin + end_row - 1), whole_end = max(0, min(key_end, end + first_row));
    return TileRange{first / kKeys, (whole_begin + kKeys - 1) / kKeys, whole_end / kKeys, (last + kKeys - 1) / kKeys};
  }
  __device__ __forceinline__ int visible_end(int end_row) const { return max(0, min(key_end, end + end_row - 1)); }

  // `row`: of the warp, in the head. `tile_key`: the first key of the tile.
  template <class Shape>
  __device__ __forceinline__ void exclude_others(Scores<Shape>& scores, int row, int tile_key) const {
    const int column = tile_key + fragment_column();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int first = begin + row + fragment_row(r) - column, last = min(end + row + fragment_row(r), key_end) - column;
      replace_outside<Shape>(scores, r, first, last, -INFINITY);
    }
  }
};

}  // namespace onnx_attn::forward_short_kernel
