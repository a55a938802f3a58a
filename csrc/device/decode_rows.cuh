// decode_rows.cuh: the arithmetic of one warp: 8 or 16 query rows against 16 keys and values at a time, with a running softmax.
//
// Keys are the rows of the first product and columns of V those of the second; the queries, 8 for each instruction, are columns of
// both. A decode step has few query rows: as rows of the products, of which there are 16, most would be padding.
#pragma once

#include "decode_mask.cuh"

namespace onnx_attn::decode {

// A warp's 8 * kRowEights query rows, their running softmax, and their output so far. The lane holds results of columns
// 2 * (lane % 4) + r of each eight, r = 0, 1: its 2 * kRowEights query rows.
template <class Element, int kHeadSize, int kRowEights>
struct RowTile {
  static constexpr int kSteps = kHeadSize / 16;                        // of 16 columns
  static constexpr int kAhead = kHeadSize * kRowEights < 256 ? 4 : 2;  // steps whose operand is on its way from shared memory
  static constexpr float kHeadroom = 8.0f;                             // weights grow up to 2^8 before they are scaled down: see update
  static constexpr bool kMayAddUp = may_add_up(kRowEights == 1 ? 1 : 9, kHeadSize);  // with as few rows as it is used for
  using S = Stage<kHeadSize>;

  uint32_t queries[kSteps][kRowEights][2];
  float output[kSteps][kRowEights][4];  // columns 16 * step + lane / 4, and 8 further on, of both rows
  float row_base[kRowEights][2];        // weights are 2^(score - base); 0 while the row has seen no key
  float row_limit[kRowEights][2];       // base + kHeadroom; -inf while the row has seen no key
  float row_sum[kRowEights][2];         // of the weights of this lane's keys

  // ldmatrix takes an address from each lane. Keys: lanes 0-15 name 16 rows, lanes 16-31 the next piece of them. Values, to be
  // transposed: lanes 8-15 name the next piece of the first 8 rows.
  static __device__ __forceinline__ int key_row() { return lane_index() % 16; }
  static __device__ __forceinline__ int key_piece() { return lane_index() / 16; }
  static __device__ __forceinline__ int value_row() { return lane_index() % 8 + lane_index() / 16 * 8; }
  static __device__ __forceinline__ int value_piece() { return lane_index() / 8 % 2; }
  // Piece 2 * step + piece of row `row` of the 16 rows of a tile that begin at `block`.
  static __device__ __forceinline__ uint32_t piece_address(uint32_t block, int row, int step, int piece) {
    return block + row * 128 + step / 4 * S::kPanelBytes + (((2 * (step % 4)) ^ piece ^ (row % 8)) << 4);
  }

  // `staged`: the queries of the block, panels of block_rows rows.
  __device__ __forceinline__ void start(uint32_t staged, int row_tile, int block_rows) {
#pragma unroll
    for (int n = 0; n < kRowEights; ++n) {
      const int row = (row_tile * kRowEights + n) * 8 + lane_index() % 8;
#pragma unroll
      for (int step = 0; step < kSteps; step += 2) {
        uint32_t fragment[4];
        device::load_matrices(fragment, staged + swizzled(row, 2 * step + lane_index() / 8, block_rows * 128));
        queries[step][n][0] = fragment[0];
        queries[step][n][1] = fragment[1];
        queries[step + 1][n][0] = fragment[2];
        queries[step + 1][n][1] = fragment[3];
      }
    }
    clear();
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < kRowEights; ++n) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) output[step][n][0] = output[step][n][1] = output[step][n][2] = output[step][n][3] = 0.0f;
      row_base[n][0] = row_base[n][1] = row_sum[n][0] = row_sum[n][1] = 0.0f;
      row_limit[n][0] = row_limit[n][1] = -INFINITY;
    }
  }

  // Products with the 16 keys at `keys`. Of 8 query rows, even and odd steps are summed apart: half as long a chain of dependent
  // products. Of 16, there are two chains anyway.
  __device__ __forceinline__ void multiply_keys(Scores<kRowEights>& scores, uint32_t keys) const {
    constexpr int kChains = kRowEights == 1 ? 2 : 1;
    Scores<kRowEights> sums[kChains] = {};
    uint32_t fragments[kAhead][4];
#pragma unroll
    for (int step = 0; step < kAhead; ++step) {
      device::load_matrices(fragments[step], piece_address(keys, key_row(), step, key_piece()));
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t (&fragment)[4] = fragments[step % kAhead];
#pragma unroll
      for (int n = 0; n < kRowEights; ++n) {
        device::multiply_accumulate<Element>(sums[step % kChains][n], fragment, queries[step][n][0], queries[step][n][1]);
      }
      if (step + kAhead < kSteps) device::load_matrices(fragment, piece_address(keys, key_row(), step + kAhead, key_piece()));
    }
    for_each_score<kRowEights>(
        [&](int n, int e) { scores[n][e] = kChains == 1 ? sums[0][n][e] : sums[0][n][e] + sums[kChains - 1][n][e]; });
  }

  // Takes the scores into the softmax and returns their weights as the right operand of the next product. Rows are rescaled only
  // when a score is 2^8 above what they are scaled to, decided for each row: rare after the first keys, and the common path needs
  // no maximum of the row, which eight lanes would have to find together.
  __device__ __forceinline__ void update(Scores<kRowEights>& scores, uint32_t (&weights)[kRowEights][2]) {
    bool is_above = false;
    for_each_score<kRowEights>([&](int n, int e) { is_above = is_above || scores[n][e] > row_limit[n][e % 2]; });
    if (__any_sync(~0u, is_above)) raise(scores);
    for_each_score<kRowEights>([&](int n, int e) {
      scores[n][e] = device::exp2_fast(scores[n][e] - row_base[n][e % 2]);
      row_sum[n][e % 2] += scores[n][e];
    });
#pragma unroll
    for (int n = 0; n < kRowEights; ++n) {
      weights[n][0] = device::transpose_matrix(device::pack<Element>(scores[n][0], scores[n][1]));
      weights[n][1] = device::transpose_matrix(device::pack<Element>(scores[n][2], scores[n][3]));
    }
  }

  // Adds the sums of the eight lanes that share a row.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int n = 0; n < kRowEights; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) row_sum[n][r] += __shfl_xor_sync(~0u, row_sum[n][r], lanes);
  }

  // Adds the 16 values at `values`, of which the first `count` exist. The others may be NaN, which a weight of 0 does not
  // undo: their bits are cleared.
  __device__ __forceinline__ void add_values(const uint32_t (&weights)[kRowEights][2], uint32_t values, int count) {
    if (count >= 16) return add_values<false>(weights, values, count);
    add_values<true>(weights, values, count);
  }

 private:
  __device__ __forceinline__ void raise(const Scores<kRowEights>& scores) {
#pragma unroll
    for (int n = 0; n < kRowEights; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float max = fmaxf(scores[n][r], scores[n][r + 2]);
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, lanes));
        if (!(max > row_limit[n][r])) continue;
        const float factor = row_limit[n][r] == -INFINITY ? 0.0f : device::exp2_fast(row_base[n][r] - max);
        row_base[n][r] = max;
        row_limit[n][r] = __fadd_rd(max, kHeadroom);  // to nearest it would be max + 16 where floats are 16 apart, and 2^16 is no float16
        row_sum[n][r] *= factor;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          output[step][n][r] *= factor;
          output[step][n][r + 2] *= factor;
        }
      }
    }
  }

  template <bool kIsPartial>
  __device__ __forceinline__ void add_values(const uint32_t (&weights)[kRowEights][2], uint32_t values, int count) {
    uint32_t keep[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = 2 * (lane_index() % 4) + 8 * half;
      keep[half] = (key < count ? 0x0000ffffu : 0u) | (key + 1 < count ? 0xffff0000u : 0u);
    }
    uint32_t fragments[kAhead][4];
#pragma unroll
    for (int step = 0; step < kAhead; ++step) {
      device::load_matrices_transposed(fragments[step], piece_address(values, value_row(), step, value_piece()));
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t (&fragment)[4] = fragments[step % kAhead];
      if constexpr (kIsPartial) {
#pragma unroll
        for (int i = 0; i < 4; ++i) fragment[i] &= keep[i / 2];
      }
#pragma unroll
      for (int n = 0; n < kRowEights; ++n) {
        device::multiply_accumulate<Element>(output[step][n], fragment, weights[n][0], weights[n][1]);
      }
      if (step + kAhead < kSteps) {
        device::load_matrices_transposed(fragment, piece_address(values, value_row(), step + kAhead, value_piece()));
      }
    }
  }
};

}  // namespace onnx_attn::decode
