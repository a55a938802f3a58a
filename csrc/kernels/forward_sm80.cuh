// forward_sm80.cuh: attention forward with mma.sync, for every GPU from compute capability 8.0 on and every feature of a Problem
// except score outputs and beams.
//
// A thread block owns a block of query rows of one head and walks the keys it can see from the last tile to the first. Each
// warp owns whole rows, so the softmax needs no other warp. One K and one V buffer are enough: V of a tile arrives while
// Q K^T is computed, the next K while the softmax and the product with V are. Two blocks share a multiprocessor: the
// tensor work of one hides the exponentials of the other.
#pragma once

#include <type_traits>

#include "../device/softmax.cuh"
#include "forward_sm80_block.cuh"

namespace onnx_attn::forward_sm80_kernel {

// A warp's Q operands: all of them, or (from shared memory) those of the k-step at hand.
template <class Element, class Shape>
struct Queries {
  using Reader = BlockReader<typename SharedMemory<Element, Shape>::QueryTile, BlockOrder::rows_first>;
  static constexpr int kSteps = Shape::kHeadSize / 16;

  uint32_t operand[Shape::kQueriesInRegisters ? kSteps : 1][Shape::kRowTiles][4];

  __device__ __forceinline__ void load(const Reader& reader, int step) {
#pragma unroll
    for (int i = 0; i < Shape::kRowTiles; ++i) load_matrices(operand[Shape::kQueriesInRegisters ? step : 0][i], reader(i, step));
  }
};

template <class Shape>
using Scores = Accumulator<Shape::kRowTiles, Shape::kKeys / 8>;
template <class Shape>
using Output = Accumulator<Shape::kRowTiles, Shape::kHeadSize / 8>;

template <class Element, class Shape>
__device__ __forceinline__ void multiply_keys(Scores<Shape>& scores, Queries<Element, Shape>& queries,
                                              SharedMemory<Element, Shape>& shared) {
  using Shared = SharedMemory<Element, Shape>;
  const BlockReader<typename Shared::QueryTile, BlockOrder::rows_first> query_blocks(shared.warp_queries());
  const BlockReader<typename Shared::KeyTile, BlockOrder::columns_first> key_blocks(shared_address(shared.keys));
#pragma unroll
  for (int step = 0; step < Shape::kHeadSize / 16; ++step) {
    if (!Shape::kQueriesInRegisters) queries.load(query_blocks, step);
    const auto& query = queries.operand[Shape::kQueriesInRegisters ? step : 0];
#pragma unroll
    for (int j = 0; j < Shape::kKeys / 16; ++j) {
      uint32_t key[4];
      load_matrices(key, key_blocks(j, step));
#pragma unroll
      for (int i = 0; i < Shape::kRowTiles; ++i) {
        multiply_accumulate<Element>(scores.value[i][2 * j], query[i], key[0], key[1]);
        multiply_accumulate<Element>(scores.value[i][2 * j + 1], query[i], key[2], key[3]);
      }
    }
  }
}

// O += softmax weights * V. Weights are made 16 keys at a time, so that exponentials run beside the products before them.
template <class Element, class Shape, class Softmax>
__device__ __forceinline__ void accumulate_values(Output<Shape>& output, Scores<Shape>& scores, Softmax& softmax, float unit,
                                                  SharedMemory<Element, Shape>& shared) {
  const BlockReader<typename SharedMemory<Element, Shape>::KeyTile, BlockOrder::rows_first> value_blocks(shared_address(shared.values));
  float reference[2 * Shape::kRowTiles];
  softmax.find_references(scores, unit, reference);
#pragma unroll
  for (int step = 0; step < Shape::kKeys / 16; ++step) {
    uint32_t weights[Shape::kRowTiles][4];
#pragma unroll
    for (int i = 0; i < Shape::kRowTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float& score = scores.value[i][2 * step + e / 4][e % 4];
        score = softmax.weight(score, 2 * i + e % 4 / 2, unit, reference[2 * i + e % 4 / 2]);
      }
      pack_operand<Element>(weights[i], scores.value[i][2 * step], scores.value[i][2 * step + 1]);
    }
#pragma unroll
    for (int j = 0; j < Shape::kHeadSize / 16; ++j) {
      uint32_t value[4];
      load_matrices_transposed(value, value_blocks(step, j));
#pragma unroll
      for (int i = 0; i < Shape::kRowTiles; ++i) {
        multiply_accumulate<Element>(output.value[i][2 * j], weights[i], value[0], value[1]);
        multiply_accumulate<Element>(output.value[i][2 * j + 1], weights[i], value[2], value[3]);
      }
    }
  }
}

template <int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void transform_scores(Accumulator<kRowTiles, kKeyTiles>& scores, const ScoreTransform& transform) {
  if (transform.form == ScoreForm::scaled) {
    const float scale = transform.scale;
    scores.for_each([&](float& score, int, int) { score *= scale; });
  } else if (transform.form == ScoreForm::capped) {
    const float cap = transform.cap, cap_in = transform.cap_in;
    scores.for_each([&](float& score, int, int) { score = capped(score, cap_in, cap); });
  }
}

// Divides by the sums, adds the projection bias of V (its weights sum to 1) and stores the warp's rows by way of shared memory.
template <class Element, class Shape, class Softmax>
__device__ __forceinline__ void store_output(Output<Shape>& output, const Softmax& softmax, SharedMemory<Element, Shape>& shared,
                                             const Problem& problem, int warp_row) {
  using Tile = typename SharedMemory<Element, Shape>::QueryTile;
  uint8_t* tile = shared.queries;  // every lane of the warp has read its share of Q
  const Work& work = shared.plan.work;
  const int columns = static_cast<int>(problem.v_head_size);
  float inverse_sum[2 * Shape::kRowTiles];
#pragma unroll
  for (int r = 0; r < 2 * Shape::kRowTiles; ++r) inverse_sum[r] = softmax.inverse_sum(r);
  // A row without keys may have added 0 * NaN from values that it must not see.
  output.for_each([&](float& value, int row, int) { value = inverse_sum[row] == 0.0f ? 0.0f : value * inverse_sum[row]; });
  if (problem.v_bias && !problem.append.active) {
    const Element* bias = static_cast<const Element*>(problem.v_bias) + work.kv_head * problem.v_head_size;
    output.for_each([&](float& value, int row, int column) {
      column += fragment_column();
      if (column < columns && !softmax.is_empty(row)) value += convert<float>(bias[column]);
    });
  }

  __syncwarp();
#pragma unroll
  for (int r = 0; r < 2 * Shape::kRowTiles; ++r) {
#pragma unroll
    for (int j = 0; j < Shape::kHeadSize / 8; ++j) {
      const float* pair = &output.value[r / 2][j][r % 2 * 2];
      *reinterpret_cast<uint32_t*>(tile + Tile::offset(warp_row + fragment_row(r), j) + fragment_column() * 2) =
          pack<Element>(pair[0], pair[1]);
    }
  }
  __syncwarp();
  Element* target = head_rows<Element>(problem.y, work.batch, work.q_head);
#pragma unroll 4
  for (int index = lane_index(); index < Shape::kWarpRows * Tile::kChunks; index += 32) {
    const int row = warp_row + index / Tile::kChunks, chunk = index % Tile::kChunks;
    if (work.first_row + row < shared.plan.end_row && chunk * 8 < columns) {
      *reinterpret_cast<uint4*>(target + (work.first_row + row) * problem.y.row_stride + chunk * 8) =
          *reinterpret_cast<const uint4*>(tile + Tile::offset(row, chunk));
    }
  }
}

// kMaskTile: there is a tensor mask or padding. With the code for it in the loop, registers spill in the plain one, and the
// largest plain tiles leave no shared memory for a mask.
template <class Element, class Shape, bool kMaskTile>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerMultiprocessor) forward(const __grid_constant__ ForwardParams params) {
  using Shared = SharedMemory<Element, Shape>;
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const Problem& problem = params.problem;

  const int warp_row = threadIdx.x / 32 * Shape::kWarpRows;
  const BlockPlan<Element, Shape>& plan = shared.plan;
  if (threadIdx.x == 0) shared.plan.place(params);
  if (threadIdx.x == 32) shared.plan.copy(params);  // another warp, so that the two run side by side
  __syncthreads();

  Output<Shape> output;
  RunningSoftmax<2 * Shape::kRowTiles> softmax;
  output.clear();

  if (plan.tiles.begin < plan.tiles.end) {
    const auto load_keys = [&](uint8_t* target, const Rows<Element>& rows, int tile) {
      // Rows past the last visible key may hold anything, NaN included, and 0 * NaN is NaN: they become zeros.
      const int first_key = tile * Shape::kKeys;
      load_tile_async<Shape::kKeys, Shape::kHeadSize, Shape::kThreads>(shared_address(target), rows.first + first_key * rows.stride,
                                                                       rows.stride, plan.key_end - first_key, rows.chunks);
      copy_async_commit();
    };
    load_queries<Element, Shape>(shared, problem);
    load_keys(shared.keys, plan.k, plan.tiles.end - 1);

    Queries<Element, Shape> queries;
    if constexpr (Shape::kQueriesInRegisters) {
      copy_async_wait<1>();
      __syncthreads();
      const typename Queries<Element, Shape>::Reader query_blocks(shared.warp_queries());
#pragma unroll
      for (int step = 0; step < Shape::kHeadSize / 16; ++step) queries.load(query_blocks, step);
    }

    const auto visit = [&](int tile, auto at_edge) __attribute__((always_inline)) {
      constexpr bool kAtEdge = decltype(at_edge)::value;
      copy_async_wait<0>();
      __syncthreads();  // K is here, and every warp has left V and the mask of the tile before
      load_keys(shared.values, plan.v, tile);
      const MaskTile<Shape::kRows, Shape::kKeys> mask_tile(shared_bytes + sizeof(Shared), plan.mask_tile);
      if constexpr (kMaskTile) {
        stage_masks<Shape>(mask_tile, shared.key_padding, plan.mask_tile, plan.mask, plan, tile * Shape::kKeys);
      }

      Scores<Shape> scores;
      scores.clear();
      multiply_keys(scores, queries, shared);

      copy_async_wait<0>();
      __syncthreads();  // V and the mask are here, and every warp has left K
      if (tile > plan.tiles.begin) load_keys(shared.keys, plan.k, tile - 1);

      transform_scores(scores, plan.transform);
      if constexpr (kMaskTile) apply_masks(scores, mask_tile, shared.key_padding, plan.mask_tile, warp_row);
      if (kAtEdge && !plan.tiles.is_whole(tile)) {
        exclude_invisible(scores, plan.mask, plan.position, plan.key_end, plan.work.first_row + warp_row, tile * Shape::kKeys);
      }

      float correction[2 * Shape::kRowTiles];
      if (softmax.advance(scores, params.unit, correction)) {
        output.for_each([&](float& value, int row, int) { value *= correction[row]; });
      }
      accumulate_values<Element, Shape>(output, scores, softmax, params.unit, shared);
    };

    int tile = plan.tiles.end - 1;
    if constexpr (kMaskTile) {
      for (; tile >= plan.tiles.begin; --tile) visit(tile, std::true_type());
    } else {
      for (; tile >= plan.tiles.whole_end; --tile) visit(tile, std::true_type());  // the ragged end and the diagonal
      for (; tile >= plan.tiles.whole_begin; --tile) visit(tile, std::false_type());
      for (; tile >= plan.tiles.begin; --tile) visit(tile, std::true_type());  // the left edge of a window
    }
  }

  softmax.finish();
  if (problem.lse && lane_index() % 4 == 0) {
#pragma unroll
    for (int r = 0; r < 2 * Shape::kRowTiles; ++r) {
      const int row = plan.work.first_row + warp_row + fragment_row(r);
      if (row < plan.end_row) {
        problem.lse[(plan.work.batch * problem.q_heads + plan.work.q_head) * problem.q_len + row] = softmax.log_sum_exp(r, params.unit);
      }
    }
  }
  store_output<Element, Shape>(output, softmax, shared, problem, warp_row);
}

}  // namespace onnx_attn::forward_sm80_kernel
