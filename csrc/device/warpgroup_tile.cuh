// warpgroup_tile.cuh: 64 query rows against a tile of keys as a Hopper warpgroup computes them: scores, weights, output, and their
// products. A Shape has kRows (of Q in shared memory), kKeys, kHeadSize and kValueSize.
#pragma once

#include "../problem.h"
#include "fragment.cuh"
#include "ptx_sm90.cuh"
#include "softmax.cuh"
#include "wgmma.cuh"

namespace onnx_attn::device {

inline constexpr int kWarpgroupRows = 64;
inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kPanelBytes = 128;  // a row of a panel: 64 columns

template <class Shape>
using Scores = Accumulator<1, Shape::kKeys / 8>;

template <class Shape>
using Output = Accumulator<1, Shape::kValueSize / 8>;

// Softmax weights as left operand of the product with V.
template <class Element, class Shape>
struct Weights {
  uint32_t operand[Shape::kKeys / 16][4];

  __device__ __forceinline__ void pack(const Scores<Shape>& weights) {
#pragma unroll
    for (int step = 0; step < Shape::kKeys / 16; ++step) {
      pack_operand<Element>(operand[step], weights.value[0][2 * step], weights.value[0][2 * step + 1]);
    }
  }
};

// scores = Q K^T, started. Rows of both operands are the depth: 16 columns of a panel are 32 bytes.
template <class Element, class Shape>
__device__ __forceinline__ void start_scores(Scores<Shape>& scores, uint32_t queries, uint32_t keys) {
  const uint64_t query = panel_descriptor(queries, 0), key = panel_descriptor(keys, 0);
  products_begin();
#pragma unroll
  for (int step = 0; step < Shape::kHeadSize / 16; ++step) {
    const int panel = step / 4, bytes = step % 4 * 32;
    multiply_keys<Element>(scores.value[0], query + (panel * Shape::kRows * kPanelBytes + bytes) / 16,
                           key + (panel * Shape::kKeys * kPanelBytes + bytes) / 16, step > 0);
  }
  products_commit();
}

// output = weights V, or output += weights V to go on, started.
template <class Element, class Shape>
__device__ __forceinline__ void start_output(Output<Shape>& output, const Weights<Element, Shape>& weights, uint32_t values, bool go_on) {
  const uint64_t value = panel_descriptor(values, Shape::kKeys * kPanelBytes);
  products_begin();
#pragma unroll
  for (int step = 0; step < Shape::kKeys / 16; ++step) {
    multiply_values<Element>(output.value[0], weights.operand[step], value + step * 16 * kPanelBytes / 16, step > 0 || go_on);
  }
  products_commit();
}

// Scores of one of the lane's two rows in columns outside of [first, last), which lack the lane's part. A select, never a sum: such a score
// may be NaN.
template <class Shape>
__device__ __forceinline__ void replace_outside(Scores<Shape>& scores, int row, int first, int last, float by) {
#pragma unroll
  for (int j = 0; j < Shape::kKeys / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (8 * j + e < first || 8 * j + e >= last) scores.value[0][j][2 * row + e] = by;
    }
  }
}

// `row`: of the warp, in the head.
__device__ __forceinline__ void store_log_sum_exp(const Problem& problem, const RunningSoftmax<2>& softmax, float unit, int64_t batch,
                                                  int64_t q_head, int row) {
  if (!problem.lse || lane_index() % 4 != 0) return;
  float* head = problem.lse + (batch * problem.q_heads + q_head) * problem.q_len;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = row + fragment_row(r);
    const float value = fmaf(softmax.row_max[r], unit * kLn2, log2f(softmax.row_sum[r]) * kLn2);
    if (query < problem.q_len) head[query] = softmax.is_empty(r) ? -INFINITY : value;
  }
}

// Normalizes a warp's output and leaves it at `place`, where the warpgroup's queries were. All warps of a warpgroup are done with
// queries when the products with them are.
template <class Element, class Shape, bool kMayBeEmpty = true>
__device__ __forceinline__ void stage_output(const Output<Shape>& output, const float (&inverse)[2], uint32_t place) {
  // A row without keys may have added 0 * NaN from values that it must not see.
  const auto normalized = [&](int j, int e) {
    return kMayBeEmpty && inverse[e / 2] == 0.0f ? 0.0f : output.value[0][j][e] * inverse[e / 2];
  };
  // Lanes 0-15 name the rows of column tile j, lanes 16-31 those of column tile j + 1.
  const int lane = lane_index(), row = threadIdx.x % kWarpgroupThreads / 32 * 16 + lane % 16;
#pragma unroll
  for (int j = 0; j < Shape::kValueSize / 8; j += 2) {
    const int chunk = (j % 8 + lane / 16) ^ row % 8;
    const auto packed = [&](int tile, int e) { return pack<Element>(normalized(tile, e), normalized(tile, e + 1)); };
    store_matrices(place + (j / 8 * Shape::kRows + row) * kPanelBytes + chunk * 16, packed(j, 0), packed(j, 2), packed(j + 1, 0),
                   packed(j + 1, 2));
  }
}

}  // namespace onnx_attn::device
