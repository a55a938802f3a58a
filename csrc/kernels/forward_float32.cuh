// forward_float32.cuh: attention forward for float32 on tensor cores, with every feature of a Problem except score outputs and beams.
//
// Numbers are pairs of float16 (device/split.cuh), and a product is three: high * high + high * low + low * high. K and V
// arrive split; Q is split as it is read, softmax weights as they are made. The walk over keys is that of forward_sm80.
#pragma once

#include "../device/softmax.cuh"
#include "forward_float32_block.cuh"

namespace onnx_attn::forward_float32_kernel {

template <class Shape>
using Scores = Accumulator<Shape::kRowTiles, Shape::kKeys / 8>;
template <class Shape>
using Output = Accumulator<Shape::kRowTiles, Shape::kHeadSize / 8>;
template <class Shape>
using RowValues = float[2 * Shape::kRowTiles];

// From products of scaled rows to scores before the mask.
template <class Shape>
__device__ __forceinline__ void unscale_scores(Scores<Shape>& scores, const SharedMemory<Shape>& shared,
                                               const RowValues<Shape>& row_factors, float softcap) {
  const float* factors = shared.key_factors + fragment_column();
  scores.for_each([&](float& score, int row, int column) { score *= factors[column] * row_factors[row]; });
  if (softcap != 0.0f) {
    const float inverse = 1.0f / softcap;
    scores.for_each([&](float& score, int, int) { score = softcap * tanhf(score * inverse); });
  }
}

// O += softmax weights * V. A tile's weights, each times the factor of its row of V, are scaled by row to the range of float16.
// Tensor cores truncate their sums, so the sums stay as short as a tile; the output itself is added up with rounding.
template <class Shape>
__device__ __forceinline__ void accumulate_values(Output<Shape>& output, Scores<Shape>& scores,
                                                  RunningSoftmax<2 * Shape::kRowTiles>& softmax, SharedMemory<Shape>& shared) {
  constexpr int kSteps = Shape::kKeys / 16;
  using ValueTile = typename SharedMemory<Shape>::KeyTile;
  RowValues<Shape> reference, largest, factor;
#pragma unroll
  for (int r = 0; r < 2 * Shape::kRowTiles; ++r) {
    reference[r] = softmax.reference(r, 1.0f);
    largest[r] = 0.0f;
  }
  const float* value_factors = shared.value_factors + fragment_column();
  scores.for_each([&](float& score, int row, int column) {  // the difference first: biases may lower a whole row to -1e9
    const float weight = exp2_fast((score - reference[row]) * kLog2e);
    softmax.row_sum[row] += weight;
    score = weight * value_factors[column];
    largest[row] = fmaxf(largest[row], score);
  });
#pragma unroll
  for (int r = 0; r < 2 * Shape::kRowTiles; ++r) {
    factor[r] = split_factor<kLeastField>(max_of_row(largest[r]));
  }

  uint32_t weights[kSteps][kParts][Shape::kRowTiles][4];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int i = 0; i < Shape::kRowTiles; ++i) {
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const float* pair = &scores.value[i][2 * step + part / 2][part % 2 * 2];
        const float inverse = inverse_factor(factor[2 * i + part % 2]);
        const SplitPair halves = split_pair(pair[0] * inverse, pair[1] * inverse);
        weights[step][kHigh][i][part] = halves.high;
        weights[step][kLow][i][part] = halves.low;
      }
    }
  }

  const BlockReader<ValueTile, BlockOrder::rows_first> value_blocks(shared_address(shared.values));
#pragma unroll
  for (int j = 0; j < Shape::kHeadSize / 16; ++j) {
    Accumulator<Shape::kRowTiles, 2> sums;
    sums.clear();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t value[kParts][4];
#pragma unroll
      for (int part = 0; part < kParts; ++part) load_matrices_transposed(value[part], value_blocks(step, j) + part * ValueTile::kBytes);
      multiply_parts<__half>(sums, 0, weights[step], value);
      if (step == kSteps / 2) __syncwarp();  // ptxas would begin all loads at once, and has no registers for them
    }
    sums.for_each([&](float& sum, int row, int column) {
      float& element = output.value[row / 2][2 * j + column / 8][row % 2 * 2 + column % 2];
      element = fmaf(sum, factor[row], element);
    });
    __syncwarp();  // ptxas would put off these sums, and has no registers for them
  }
}

// Divides by the sums and stores the warp's rows.
template <class Shape>
__device__ __forceinline__ void store_output(Output<Shape>& output, const RunningSoftmax<2 * Shape::kRowTiles>& softmax,
                                             const BlockPlan<Shape>& plan, const Problem& problem, int warp_row) {
  const int columns = static_cast<int>(problem.v_head_size);
  float* y = head_rows<float>(problem.y, plan.work.batch, plan.work.q_head);
#pragma unroll
  for (int r = 0; r < 2 * Shape::kRowTiles; ++r) {
    const int row = plan.work.first_row + warp_row + fragment_row(r);
    if (row >= plan.end_row) continue;
    const float inverse_sum = softmax.inverse_sum(r);
    float* target = y + row * problem.y.row_stride;
    const bool is_aligned = reinterpret_cast<uintptr_t>(target) % sizeof(float2) == 0;
#pragma unroll
    for (int j = 0; j < Shape::kHeadSize / 8; ++j) {
      const int column = 8 * j + fragment_column();
      float2 pair = make_float2(output.value[r / 2][j][r % 2 * 2] * inverse_sum, output.value[r / 2][j][r % 2 * 2 + 1] * inverse_sum);
      // A row without keys may have added 0 * NaN from values that it must not see.
      if (inverse_sum == 0.0f) pair = make_float2(0.0f, 0.0f);
      if (is_aligned && column + 1 < columns) {
        *reinterpret_cast<float2*>(target + column) = pair;
      } else {
        if (column < columns) target[column] = pair.x;
        if (column + 1 < columns) target[column + 1] = pair.y;
      }
    }
  }
}

// kMayHaveExtras: a mask tile or softcap. With code for them the widest shape would spill, and the tile would not fit beside it.
template <class Shape, bool kMayHaveExtras>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerMultiprocessor) forward(const __grid_constant__ ForwardParams params) {
  using Shared = SharedMemory<Shape>;
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const Problem& problem = params.problem;

  const int warp_row = threadIdx.x / 32 * Shape::kWarpRows;
  const BlockPlan<Shape>& plan = shared.plan;
  if (threadIdx.x == 0) shared.plan.place(params);
  if (threadIdx.x == 32) shared.plan.copy(params);  // another warp, so that the two run side by side
  __syncthreads();

  Output<Shape> output;
  RunningSoftmax<2 * Shape::kRowTiles> softmax;
  if (plan.tiles.begin < plan.tiles.end) {
    load_rows<Shape>(shared.keys, shared.key_factors, plan.k, plan.tiles.end - 1, plan.key_end);
    load_queries(shared, params, warp_row);
    __syncwarp();
  }
  output.clear();  // after Q was split: that takes registers too

  if (plan.tiles.begin < plan.tiles.end) {
    RowValues<Shape> query_factors;
#pragma unroll
    for (int r = 0; r < 2 * Shape::kRowTiles; ++r) query_factors[r] = shared.query_factors[warp_row + fragment_row(r)];

    for (int tile = plan.tiles.end - 1; tile >= plan.tiles.begin; --tile) {
      copy_async_wait<0>();
      __syncthreads();  // K is here, and every warp has left V and the mask of the tile before
      load_rows<Shape>(shared.values, shared.value_factors, plan.v, tile, plan.key_end);
      const MaskTile<Shape::kRows, Shape::kKeys> mask_tile(shared_bytes + sizeof(Shared), plan.mask_tile);
      if (kMayHaveExtras && plan.has_mask_tile) {
        stage_masks<Shape>(mask_tile, shared.key_padding, plan.mask_tile, plan.mask, plan, tile * Shape::kKeys);
      }

      Scores<Shape> scores;
      scores.clear();
      multiply_rows<__half, kParts, typename Shared::QueryTile, typename Shared::KeyTile>(
          scores, shared_address(shared.queries) + warp_row * Shared::QueryTile::kPitch, shared_address(shared.keys));
      unscale_scores(scores, shared, query_factors, kMayHaveExtras ? plan.softcap : 0.0f);

      copy_async_wait<0>();
      __syncthreads();  // V and the mask are here, and every warp has left K
      if (tile > plan.tiles.begin) load_rows<Shape>(shared.keys, shared.key_factors, plan.k, tile - 1, plan.key_end);

      if (kMayHaveExtras && plan.has_mask_tile) apply_masks<true>(scores, mask_tile, shared.key_padding, plan.mask_tile, warp_row);
      if (!plan.tiles.is_whole(tile)) {
        exclude_invisible(scores, plan.mask, plan.position, plan.key_end, plan.work.first_row + warp_row, tile * Shape::kKeys);
      }

      float correction[2 * Shape::kRowTiles];
      if (softmax.advance(scores, kLog2e, correction)) {
        output.for_each([&](float& value, int row, int) { value *= correction[row]; });
      }
      accumulate_values(output, scores, softmax, shared);
    }
  }

  softmax.finish();
  if (problem.lse && lane_index() % 4 == 0) {
#pragma unroll
    for (int r = 0; r < 2 * Shape::kRowTiles; ++r) {
      const int row = plan.work.first_row + warp_row + fragment_row(r);
      const float lse = softmax.is_empty(r) ? -INFINITY : softmax.row_max[r] + logf(softmax.row_sum[r]);
      if (row < plan.end_row) problem.lse[(plan.work.batch * problem.q_heads + plan.work.q_head) * problem.q_len + row] = lse;
    }
  }
  store_output(output, softmax, plan, problem, warp_row);
}

}  // namespace onnx_attn::forward_float32_kernel
