// scores.cuh: the output of Q K^T, at any stage between the bare product and the softmax weights, every cell of it.
//
// A thread block owns a block of query rows and a span of keys. Writing is the cost: tiles go through shared memory to leave
// in whole lines, and nothing is multiplied where masks alone decide. Weights come from the log-sum-exp of the kernel that made Y.
#pragma once

#include "../device/base_2.cuh"
#include "../device/output_weight.cuh"
#include "scores_block.cuh"
#ifdef ONNX_ATTN_WARPGROUPS
#include "../device/ptx_sm90.cuh"
#include "../device/wgmma.cuh"
#endif

namespace onnx_attn::scores_kernel {

template <class Shape>
using Scores = Accumulator<Shape::kRowTiles, kKeys / 8>;
template <class Shape>
using RowValues = float[2 * Shape::kRowTiles];

#ifdef ONNX_ATTN_WARPGROUPS
template <class Shape>
__device__ __forceinline__ void multiply_chunk_together(Scores<Shape>& scores, SharedMemory<Shape>& shared, int chunk, int stage) {
  using QueryTile = typename SharedMemory<Shape>::QueryTile;
  using KeyTile = typename SharedMemory<Shape>::KeyTile;
  constexpr int kParts = Shape::kParts, kRowTileStep = 64 * QueryTile::kPitch / 16, kDepthStep = 32 / 16;
  const uint64_t queries = panel_descriptor(shared_address(shared.queries()) + chunk * kParts * QueryTile::kBytes, 0);
  const uint64_t keys = panel_descriptor(shared_address(shared.keys[stage]), 0);
  products_begin();
#pragma unroll
  for (int step = 0; step < kDepth / 16; ++step) {
#pragma unroll
    for (int product = kParts == 1 ? 2 : 0; product < 3; ++product) {
      const uint64_t query = queries + (product == 0 ? QueryTile::kBytes / 16 : 0) + step * kDepthStep;
      const uint64_t key = keys + (product == 1 ? KeyTile::kBytes / 16 : 0) + step * kDepthStep;
#pragma unroll
      for (int i = 0; i < Shape::kRowTiles; ++i) {
        multiply_keys<typename Shape::Operand>(scores.value[i], query + i * kRowTileStep, key, true);
      }
    }
  }
  products_commit();
  products_wait<0>();
}
#endif

// Products of the columns in one chunk.
template <class Shape>
__device__ __forceinline__ void multiply_chunk(Scores<Shape>& scores, SharedMemory<Shape>& shared, int chunk, int stage, int warp_row) {
  using QueryTile = typename SharedMemory<Shape>::QueryTile;
  using KeyTile = typename SharedMemory<Shape>::KeyTile;
  constexpr int kParts = Shape::kParts;
  const uint32_t queries = shared_address(shared.queries()) + chunk * kParts * QueryTile::kBytes + warp_row * QueryTile::kPitch;
  multiply_rows<typename Shape::Operand, kParts, QueryTile, KeyTile>(scores, queries, shared_address(shared.keys[stage]));
}

using KeyFactors = float[kKeys / 8][2];  // of this lane's columns in a tile

template <class Shape>
__device__ __forceinline__ void read_key_factors(KeyFactors& factors, const ScoresParams& params, const BlockPlan& plan, int tile) {
  if constexpr (Shape::kIsSplit) {
    const int64_t row = (plan.batch * params.problem.kv_heads + plan.kv_head) * params.split_k.rows + tile * kKeys;
    const float* source = params.split_k.factors + row + fragment_column();
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
      const float2 pair = *reinterpret_cast<const float2*>(source + 8 * j);
      factors[j][0] = pair.x;
      factors[j][1] = pair.y;
    }
  }
}

// From the product to the scores of the operator before the mask.
template <class Shape>
__device__ __forceinline__ void scale_scores(Scores<Shape>& scores, const SharedMemory<Shape>& shared, const ScoresParams& params,
                                             const KeyFactors& key_factors, int warp_row) {
  if constexpr (Shape::kIsSplit) {
    RowValues<Shape> row_factors;
#pragma unroll
    for (int r = 0; r < 2 * Shape::kRowTiles; ++r) row_factors[r] = shared.query_factors[warp_row + fragment_row(r)];
    scores.for_each([&](float& score, int row, int column) { score *= key_factors[column / 8][column % 8] * row_factors[row]; });
  } else {
    const float scale = params.scale;
    scores.for_each([&](float& score, int, int) { score *= scale; });
  }
  if (params.softcap == 0.0f || params.problem.score_mode == ScoreMode::raw) return;
  const float cap = params.softcap;
  if constexpr (Shape::kIsSplit) {
    const float inverse = 1.0f / cap;
    scores.for_each([&](float& score, int, int) { score = cap * tanhf(score * inverse); });
  } else {
    const float cap_in = 2 * kLog2e / cap;
    scores.for_each([&](float& score, int, int) { score = capped(score, cap_in, cap); });
  }
}

// com.microsoft shows a score plus the lowest float32 where causality forbids a key.
template <class Shape>
__device__ __forceinline__ void add_causal_bias(Scores<Shape>& scores, const BlockPlan& plan, int64_t right, int warp_row, int first_key) {
#pragma unroll
  for (int row = 0; row < 2 * Shape::kRowTiles; ++row) {
    const int query = plan.first_row + warp_row + fragment_row(row);
    const int64_t allowed = query + plan.position.offset + right + 1 - first_key;
    const int end = static_cast<int>(max(int64_t{0}, min(int64_t{kKeys}, allowed))) - fragment_column();
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (8 * j + e >= end) scores.value[row / 2][j][row % 2 * 2 + e] += -FLT_MAX;
      }
    }
  }
}

template <class Shape>
__device__ __forceinline__ void mask_scores(Scores<Shape>& scores, SharedMemory<Shape>& shared, const ScoresParams& params,
                                            const MaskTile<Shape::kRows, kKeys>& mask_tile, int tile, int warp_row) {
  const BlockPlan& plan = shared.plan;
  if (plan.has_mask_tile) apply_masks<true>(scores, mask_tile, shared.key_padding, plan.mask_tile, warp_row);
  const int first_key = tile * kKeys;
  if (params.adds_causal_bias) add_causal_bias<Shape>(scores, plan, params.problem.mask.right, warp_row, first_key);
  if (!plan.visible.is_whole(tile)) {
    exclude_invisible(scores, plan.mask, plan.position, INT_MAX, plan.first_row + warp_row, first_key);
  }
}

// Calls body(scores, tile) for the tiles [begin, end), with scores before the mask.
template <class Shape, class Body>
__device__ __forceinline__ void for_each_tile(SharedMemory<Shape>& shared, const ScoresParams& params,
                                              const MaskTile<Shape::kRows, kKeys>& mask_tile, int warp_row, int begin, int end,
                                              Body&& body) {
  const BlockPlan& plan = shared.plan;
  KeyStream<Shape> stream{begin, end};
  __syncthreads();  // what the ring and the mask tile held before has been read
#pragma unroll
  for (int i = 0; i < Shape::kStages - 1; ++i) stream.request(shared, params);
  int stage = 0;
#pragma unroll 1
  for (int tile = begin; tile < end; ++tile) {
    if (plan.has_mask_tile) {
      const int first_key = tile * kKeys;
      const MaskCorner corner{static_cast<int>(plan.batch),  static_cast<int>(plan.q_head), plan.first_row, first_key,
                              plan.end_row - plan.first_row, plan.readable_end - first_key};
      if (tile > begin) __syncthreads();  // every warp has left the mask of the tile before
      stage_mask_tile<Shape::kRows, kKeys, kThreads>(mask_tile, plan.mask_tile, plan.mask, corner);
      stage_key_padding<kKeys>(shared.key_padding, plan.mask_tile, plan.mask.padding, corner.batch, first_key);
      copy_async_commit();
    }
    KeyFactors key_factors;
    read_key_factors<Shape>(key_factors, params, plan, tile);  // long before they are needed
    Scores<Shape> scores;
    scores.clear();
#pragma unroll 1
    for (int chunk = 0; chunk < params.depth_chunks; ++chunk) {
      copy_async_wait<Shape::kStages - 2>();
#ifdef ONNX_ATTN_WARPGROUPS
      publish_to_bulk_copies();
#endif
      __syncthreads();  // the chunk is here, and every warp has left the stage that is requested next
      stream.request(shared, params);
#ifdef ONNX_ATTN_WARPGROUPS
      multiply_chunk_together<Shape>(scores, shared, chunk, stage);
#else
      multiply_chunk<Shape>(scores, shared, chunk, stage, warp_row);
#endif
      stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
    }
    if (plan.has_mask_tile) {
      copy_async_wait<0>();
      __syncthreads();
    }
    scale_scores<Shape>(scores, shared, params, key_factors, warp_row);
    body(scores, tile);
  }
}

// Weights are exp(score - reference) * factor.
template <class Shape>
struct Normalization {
  RowValues<Shape> reference, factor;

  // False where a log-sum-exp is so large that its rounding would show, or not finite: then the row's statistics are needed.
  __device__ __forceinline__ bool read(const ScoresParams& params, const BlockPlan& plan, int warp_row) {
    constexpr float kAccurate = 64.0f;
    bool is_accurate = true;
#pragma unroll
    for (int r = 0; r < 2 * Shape::kRowTiles; ++r) {
      const int query = plan.first_row + warp_row + fragment_row(r);
      float lse = 0.0f;
      if (query < plan.end_row)
        lse = params.problem.lse[(plan.batch * params.problem.q_heads + plan.q_head) * params.problem.q_len + query];
      const bool is_empty = lse == -INFINITY;
      is_accurate &= is_empty || fabsf(lse) <= kAccurate;
      reference[r] = is_empty ? 0.0f : lse;
      factor[r] = 1.0f;
    }
    return is_accurate;
  }

  // The running maximum (reference) and this lane's sum (factor).
  __device__ __forceinline__ void start_statistics() {
#pragma unroll
    for (int r = 0; r < 2 * Shape::kRowTiles; ++r) {
      reference[r] = -INFINITY;
      factor[r] = 0.0f;
    }
  }
  __device__ __forceinline__ float base(int row) const { return reference[row] == -INFINITY ? 0.0f : reference[row]; }
  __device__ __forceinline__ void advance(Scores<Shape>& scores) {
    RowValues<Shape> largest;
#pragma unroll
    for (int r = 0; r < 2 * Shape::kRowTiles; ++r) largest[r] = reference[r];
    scores.for_each([&](float score, int row, int) { largest[row] = fmaxf(largest[row], score); });
#pragma unroll
    for (int r = 0; r < 2 * Shape::kRowTiles; ++r) {
      const float old = base(r);
      reference[r] = max_of_row(largest[r]);
      if (factor[r] != 0.0f) factor[r] *= exp2_fast((old - base(r)) * kLog2e);
    }
    scores.for_each([&](float score, int row, int) { factor[row] += exp2_fast((score - base(row)) * kLog2e); });
  }
  __device__ __forceinline__ void finish_statistics() {
#pragma unroll
    for (int r = 0; r < 2 * Shape::kRowTiles; ++r) {
      const float sum = sum_of_row(factor[r]);
      factor[r] = sum == 0.0f ? 0.0f : 1.0f / sum;
      reference[r] = base(r);
    }
  }
  __device__ __forceinline__ void apply(Scores<Shape>& scores) const {
    scores.for_each(
        [&](float& score, int row, int) { score = exp2_fast(fmaf(score - reference[row], kLog2e, kLift)) * (factor[row] * kUnlift); });
  }
};

// Stores the warp's rows of a tile, 16 at a time, by way of shared memory. They are not read again soon and pass the caches by.
template <class Shape>
__device__ __forceinline__ void store_tile(Scores<Shape>& scores, SharedMemory<Shape>& shared, const Problem& problem, int tile,
                                           int warp_row) {
  using Element = typename Shape::Element;
  constexpr int kPitch = Shape::kOutputPitch;
  constexpr int kVector = 16 / sizeof(Element), kVectors = kKeys / kVector;
  const BlockPlan& plan = shared.plan;
  const int64_t head = plan.batch * problem.q_heads + plan.q_head, row_stride = problem.kv_len;
  const int first_key = tile * kKeys, keys = static_cast<int>(min(int64_t{kKeys}, problem.kv_len - first_key));
  uint8_t* staged = shared.output + threadIdx.x / 32 * 16 * kPitch;
#pragma unroll
  for (int i = 0; i < Shape::kRowTiles; ++i) {
    __syncwarp();  // the rows before have been read
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint8_t* row = staged + fragment_row(half) * kPitch + fragment_column() * sizeof(Element);
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
        const float* pair = &scores.value[i][j][half * 2];
        if constexpr (Shape::kIsSplit) {
          *reinterpret_cast<float2*>(row + 8 * j * sizeof(Element)) = make_float2(pair[0], pair[1]);
        } else {
          *reinterpret_cast<uint32_t*>(row + 8 * j * sizeof(Element)) = pack<Element>(pair[0], pair[1]);
        }
      }
    }
    __syncwarp();

    const int first_row = plan.first_row + warp_row + 16 * i, rows = plan.end_row - first_row;
    Element* target = static_cast<Element*>(problem.scores) + (head * problem.q_len + first_row) * row_stride + first_key;
    if (row_stride % kVector == 0) {  // the tensor itself is aligned
#pragma unroll
      for (int index = lane_index(); index < 16 * kVectors; index += 32) {
        const int row = index / kVectors, column = index % kVectors * kVector;
        if (row < rows && column < keys) {
          __stcs(reinterpret_cast<uint4*>(target + row * row_stride + column),
                 *reinterpret_cast<const uint4*>(staged + row * kPitch + column * sizeof(Element)));
        }
      }
    } else {
#pragma unroll 4
      for (int index = lane_index(); index < 16 * kKeys; index += 32) {
        const int row = index / kKeys, column = index % kKeys;
        if (row < rows && column < keys) {
          target[row * row_stride + column] = *reinterpret_cast<const Element*>(staged + row * kPitch + column * sizeof(Element));
        }
      }
    }
  }
}

template <class Shape>
__global__ void __launch_bounds__(kThreads, Shape::kBlocksPerMultiprocessor) write_scores(const __grid_constant__ ScoresParams params) {
  using Shared = SharedMemory<Shape>;
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const Problem& problem = params.problem;
  const BlockPlan& plan = shared.plan;
  const int warp_row = threadIdx.x / 32 * Shape::kWarpRows;
  if (threadIdx.x == 0) shared.plan.place(params, Shape::kRows);
  __syncthreads();

  if constexpr (Shape::kIsSplit) {
    load_split_queries<Shape>(shared, params, warp_row);
  } else {
    copy_queries<Shape>(shared, params);
  }
  const MaskTile<Shape::kRows, kKeys> mask_tile(shared.mask_tile(params.depth_chunks), plan.mask_tile);
  const bool is_masked = problem.score_mode != ScoreMode::raw && problem.score_mode != ScoreMode::capped;
  const bool is_weights = problem.score_mode == ScoreMode::weights;

  Normalization<Shape> normalization;
  if (is_weights) {
    if (!normalization.read(params, plan, warp_row)) shared.plan.needs_statistics = true;
    __syncthreads();
    if (plan.needs_statistics) {
      normalization.start_statistics();
      for_each_tile<Shape>(shared, params, mask_tile, warp_row, plan.visible.begin, plan.visible.end, [&](Scores<Shape>& scores, int tile) {
        mask_scores<Shape>(scores, shared, params, mask_tile, tile, warp_row);
        normalization.advance(scores);
      });
      normalization.finish_statistics();
    }
  }

  const auto fill = [&](int begin, int end) {
    Scores<Shape> scores;
    scores.for_each([&](float& score, int, int) { score = is_weights ? 0.0f : -INFINITY; });
#pragma unroll 1
    for (int tile = begin; tile < end; ++tile) store_tile<Shape>(scores, shared, problem, tile, warp_row);
  };
  const int begin = max(plan.first_tile, min(plan.end_tile, plan.readable_begin / kKeys));
  const int end = max(begin, min(plan.end_tile, (plan.readable_end + kKeys - 1) / kKeys));
  fill(plan.first_tile, begin);
  for_each_tile<Shape>(shared, params, mask_tile, warp_row, begin, end, [&](Scores<Shape>& scores, int tile) {
    if (is_masked) mask_scores<Shape>(scores, shared, params, mask_tile, tile, warp_row);
    if (is_weights) normalization.apply(scores);
    store_tile<Shape>(scores, shared, problem, tile, warp_row);
  });
  fill(end, plan.end_tile);
  copy_async_wait<0>();
}

}  // namespace onnx_attn::scores_kernel
