// decode_rows.cuh: the arithmetic of one warp: 16 query rows against 16 keys and values at a time, with a running softmax.
#pragma once

#include "decode_mask.cuh"

namespace onnx_attn::decode {

// A warp's 16 query rows, their running softmax, and their output so far.
template <class Element, int kHeadSize>
struct RowTile {
  static constexpr bool kHoldsQueries = kHeadSize <= 128;  // in registers; wider ones come from shared memory each time
  static constexpr int kSteps = kHeadSize / 16;            // of 16 columns
  using S = Stage<kHeadSize>;

  uint32_t queries[kHoldsQueries ? kSteps : 1][4];
  uint32_t query_address;  // of this lane, for ldmatrix
  int query_panel_bytes;
  float output[kHeadSize / 8][4];
  float row_max[2], row_sum[2];  // base 2; the sum is of this lane's keys only

  // ldmatrix takes an address from each lane. Queries and values: lanes 0-15 name 16 rows, lanes 16-31 the next piece of
  // them. Keys, whose rows are the columns of the product: lanes 8-15 name the next piece of the first 8 rows.
  static __device__ __forceinline__ int value_row() { return lane_index() % 16; }
  static __device__ __forceinline__ int value_piece() { return lane_index() / 16; }
  static __device__ __forceinline__ int key_row() { return lane_index() % 8 + lane_index() / 16 * 8; }
  static __device__ __forceinline__ int key_piece() { return lane_index() / 8 % 2; }
  // Piece 2 * step + piece of a swizzled row whose address is `row`; rows of 16-row blocks have lane % 8 = row % 8.
  static __device__ __forceinline__ uint32_t piece_address(uint32_t row, int step, int piece, int panel_bytes) {
    return row + step / 4 * panel_bytes + (((2 * (step % 4)) ^ piece ^ (lane_index() % 8)) << 4);
  }

  __device__ __forceinline__ void start(uint32_t staged, int row_tile, int row_tiles) {
    query_panel_bytes = row_tiles * kTileRows * 128;
    query_address = staged + (row_tile * kTileRows + value_row()) * 128;
    if constexpr (kHoldsQueries) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) load_queries(queries[step], step);
    }
#pragma unroll
    for (int i = 0; i < kHeadSize / 8; ++i) output[i][0] = output[i][1] = output[i][2] = output[i][3] = 0.0f;
    row_max[0] = row_max[1] = -INFINITY;
    row_sum[0] = row_sum[1] = 0.0f;
  }

  __device__ __forceinline__ void load_queries(uint32_t (&fragment)[4], int step) const {
    device::load_matrices(fragment, piece_address(query_address, step, value_piece(), query_panel_bytes));
  }

  // Products with the 16 keys at `keys`. Even and odd steps are summed apart: half as long a chain of dependent products.
  __device__ __forceinline__ void multiply_keys(Scores& scores, uint32_t keys) {
    const uint32_t row = keys + key_row() * 128;
    Scores sums[2] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t fragment[4];
      device::load_matrices(fragment, piece_address(row, step, key_piece(), S::kPanelBytes));
      uint32_t (&query)[4] = queries[kHoldsQueries ? step : 0];
      if constexpr (!kHoldsQueries) load_queries(query, step);
      device::multiply_accumulate<Element>(sums[step % 2][0], query, fragment[0], fragment[1]);
      device::multiply_accumulate<Element>(sums[step % 2][1], query, fragment[2], fragment[3]);
    }
    for_each_score([&](int half, int e, int, int) { scores[half][e] = sums[0][half][e] + sums[1][half][e]; });
  }

  // Takes the scores into the softmax and returns their weights as the left operand of the next product.
  __device__ __forceinline__ void update(Scores& scores, uint32_t (&weights)[4]) {
    float new_max[2] = {row_max[0], row_max[1]};
    for_each_score([&](int half, int e, int row, int) { new_max[row] = fmaxf(new_max[row], scores[half][e]); });
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      new_max[r] = fmaxf(new_max[r], __shfl_xor_sync(~0u, new_max[r], 1));
      new_max[r] = fmaxf(new_max[r], __shfl_xor_sync(~0u, new_max[r], 2));
    }
    // Rare after the first tiles, and exact to skip: the other rows' factor is 1.
    if (__any_sync(~0u, new_max[0] > row_max[0] || new_max[1] > row_max[1])) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float factor = new_max[r] > row_max[r] ? device::exp2_fast(row_max[r] - new_max[r]) : 1.0f;
        row_max[r] = new_max[r];
        row_sum[r] *= factor;
#pragma unroll
        for (int i = 0; i < kHeadSize / 8; ++i) {
          output[i][2 * r] *= factor;
          output[i][2 * r + 1] *= factor;
        }
      }
    }
    const float reference[2] = {row_max[0] == -INFINITY ? 0.0f : row_max[0], row_max[1] == -INFINITY ? 0.0f : row_max[1]};
    for_each_score([&](int half, int e, int row, int) {
      scores[half][e] = device::exp2_fast(scores[half][e] - reference[row]);
      row_sum[row] += scores[half][e];
    });
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      weights[2 * half] = device::pack<Element>(scores[half][0], scores[half][1]);
      weights[2 * half + 1] = device::pack<Element>(scores[half][2], scores[half][3]);
    }
  }

  // Adds the sums of the four lanes that share a row.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 1);
      row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 2);
    }
  }

  // Adds the 16 values at `values`, of which the first `count` exist. The others may be NaN, which a weight of 0 does not
  // undo: their bits are cleared.
  __device__ __forceinline__ void add_values(const uint32_t (&weights)[4], uint32_t values, int count) {
    const uint32_t row = values + value_row() * 128;
    uint32_t keep[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = lane_key() + 8 * half;
      keep[half] = (key < count ? 0x0000ffffu : 0u) | (key + 1 < count ? 0xffff0000u : 0u);
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t fragment[4];
      device::load_matrices_transposed(fragment, piece_address(row, step, value_piece(), S::kPanelBytes));
      device::multiply_accumulate<Element>(output[2 * step], weights, fragment[0] & keep[0], fragment[1] & keep[1]);
      device::multiply_accumulate<Element>(output[2 * step + 1], weights, fragment[2] & keep[0], fragment[3] & keep[1]);
    }
  }
};

}  // namespace onnx_attn::decode
