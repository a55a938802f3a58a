// score_pass_sm90.cuh: scores made again once Y is there, where they cannot leave while it is made: softmax weights, which need a finished
// sum, and products of keys that no row sees. The parts of the Hopper forward kernel without V.
#pragma once

#include <type_traits>

#include "../device/output_weight.cuh"
#include "forward_sm90_dealer.cuh"
#include "forward_sm90_loader.cuh"
#include "forward_sm90_score_output.cuh"

namespace onnx_attn::forward_sm90_kernel {

// Two warpgroups: one's products run beside the exponentials and stores of the other. With heads of 256 there is one place for Q.
template <int kHeadSize_>
struct ScorePassShape {
  static constexpr int kHeadSize = kHeadSize_;
  static constexpr int kValueSize = 0;
  static constexpr int kKeys = 128;
  static constexpr int kWarpgroups = 2;

  static constexpr int kRows = kWarpgroups * kWarpgroupRows;
  static constexpr int kThreads = (kWarpgroups + 1) * kWarpgroupThreads;
  static constexpr int kKeyPanels = kHeadSize / 64;
  static constexpr int kQueryBytes = kRows * kKeyPanels * kPanelBytes;
  static constexpr int kKeyBytes = kKeys * kKeyPanels * kPanelBytes;
  static constexpr int kScoreBytes = kRows * kKeys * 2;
  static constexpr int kQueryStages = kHeadSize > 128 ? 1 : 2;
  static constexpr int kStages = kHeadSize > 128 ? 2 : 3;
  static constexpr int kScorePlaces = kHeadSize > 128 ? 1 : 2;

  static constexpr int kLoaderRegisters = 40;
  static constexpr int kConsumerRegisters = 232;
};

template <class Shape>
struct ScorePassMemory {
  alignas(1024) uint8_t queries[Shape::kQueryStages][Shape::kQueryBytes];
  alignas(1024) uint8_t keys[Shape::kStages][Shape::kKeyBytes];
  alignas(1024) uint8_t scores[Shape::kScorePlaces][Shape::kScoreBytes];
  RingBarriers<Shape::kQueryStages> query_ring;
  RingBarriers<Shape::kStages> key_ring;
  RingBarriers<4> block_ring;
  RowBlock<Shape> blocks[4];
  bool needs_sums[4];  // of a block: some log-sum-exp is so large that its rounding would show, or not finite
};

// A warp looks at the rows of a block.
template <class Shape>
__device__ __forceinline__ bool needs_sums(const Problem& problem, int batch, int q_head, int first_row) {
  constexpr float kAccurate = 64.0f;
  const float* head = problem.lse + (static_cast<int64_t>(batch) * problem.q_heads + q_head) * problem.q_len;
  const int end_row = static_cast<int>(min(int64_t{first_row} + Shape::kRows, problem.q_len));
  bool is_accurate = true;
  for (int row = first_row + lane_index(); row < end_row; row += 32) {
    const float lse = head[row];
    is_accurate &= lse == -INFINITY || fabsf(lse) <= kAccurate;
  }
  return __any_sync(~0u, !is_accurate);
}

template <class Shape>
__device__ __forceinline__ void load_keys(ScorePassMemory<Shape>& shared, const ForwardParams& params) {
  int loaded = 0;  // key tiles since launch
#pragma unroll 1
  for (int round = 0;; ++round) {
    shared.block_ring.wait_full(round);
    const int place = shared.block_ring.stage(round);
    const RowBlock<Shape>& block = shared.blocks[place];
    if (block.first_row == RowBlock<Shape>::kNoRow) return;
    const int kv_head = block.kv_head, batch = block.batch, end = block.tiles.end, begin = block.tiles.begin;
    const int sweeps = shared.needs_sums[place] ? 2 : 1;
    shared.block_ring.release(round);
#pragma unroll 1
    for (int sweep = 0; sweep < sweeps; ++sweep) {
#pragma unroll 1
      for (int tile = begin; tile < end; ++tile, ++loaded) {
        shared.key_ring.wait_free(loaded);
        load_panels<Shape::kKeys, Shape::kKeyPanels>(shared.keys[shared.key_ring.stage(loaded)], params.maps.k, tile * Shape::kKeys,
                                                     kv_head, batch, shared.key_ring.full_barrier(loaded), Keep::long_);
      }
    }
  }
}

template <class Shape>
__device__ __forceinline__ void load_queries(ScorePassMemory<Shape>& shared, const ForwardParams& params) {
#pragma unroll 1
  for (int round = 0;; ++round) {
    shared.block_ring.wait_full(round);
    const RowBlock<Shape>& block = shared.blocks[shared.block_ring.stage(round)];
    if (block.first_row == RowBlock<Shape>::kNoRow) return;
    const int row = block.first_row, head = block.q_head, batch = block.batch;
    shared.block_ring.release(round);
    shared.query_ring.wait_free(round);
    load_panels<Shape::kRows, Shape::kKeyPanels>(shared.queries[shared.query_ring.stage(round)], params.maps.q, row, head, batch,
                                                 shared.query_ring.full_barrier(round), Keep::briefly);
  }
}

// A warpgroup that computes 64 rows of a block.
template <class Element, class Shape, ScoreWork kScoreWork, bool kIsWeights>
__device__ __forceinline__ void write_scores(ScorePassMemory<Shape>& shared, const ForwardParams& params, int warpgroup) {
  const Problem& problem = params.problem;
  const float unit = params.transform.unit;
  // float16 ends above the numbers that exp2_fast does not have.
  constexpr bool kLifts = kIsWeights && std::is_same_v<Element, __nv_bfloat16>;
  constexpr float kWeightLift = kLifts ? kLift : 0.0f, kWeightUnlift = kLifts ? kUnlift : 1.0f;
  const int row = warpgroup * kWarpgroupRows + threadIdx.x % kWarpgroupThreads / 32 * 16;  // of the warp, in a block
  const bool is_leader = threadIdx.x % kWarpgroupThreads == 0;
  int used = 0;     // key tiles since launch
  int written = 0;  // of the warp's tiles

#pragma unroll 1
  for (int round = 0;; ++round) {
    shared.block_ring.wait_full(round);
    const RowBlock<Shape>& block = shared.blocks[shared.block_ring.stage(round)];
    if (uniform(block.first_row) == RowBlock<Shape>::kNoRow) return wait_for_scores();
    const TileRange own = block.own_tiles(warpgroup);
    const int begin = uniform(block.tiles.begin), end = uniform(block.tiles.end);
    shared.query_ring.wait_full(round);
    const uint32_t queries = shared_address(shared.queries[shared.query_ring.stage(round)]) + warpgroup * kWarpgroupRows * kPanelBytes;

    // Calls body(scores, tile) for the tiles that the warpgroup visits, with what enters the softmax.
    const auto sweep = [&](auto&& body) __attribute__((always_inline)) {
#pragma unroll 1
      for (int tile = begin; tile < end; ++tile, ++used) {
        const bool is_own = tile >= own.begin && tile < own.end;
        Scores<Shape> scores;
        shared.key_ring.wait_full(used);
        if (is_own) {
          start_scores<Element, Shape>(scores, queries, shared_address(shared.keys[shared.key_ring.stage(used)]));
          products_wait<0>();
        } else {
          meet(kFirstWarpgroup + warpgroup, kWarpgroupThreads);  // a warp that came later could find the place filled again
        }
        if (is_leader) shared.key_ring.release(used);
        if (!is_own) continue;
        const bool is_edge = !own.is_whole(tile);
        const KeyLimits limits(block, row, tile * Shape::kKeys);
        if constexpr (kScoreWork == ScoreWork::cap) {
          if (is_edge) limits.template replace_others<Shape>(scores, 0.0f);
          cap_scores<Shape>(scores, params.transform);
        }
        if (is_edge) limits.template replace_others<Shape>(scores, -INFINITY);
        body(scores, tile);
      }
    };

    float reference[2] = {0.0f, 0.0f}, factor[2] = {1.0f, 1.0f};  // a weight is 2^(score * unit - reference) * factor
    RunningSoftmax<2> softmax;
    const bool needs_sums = kIsWeights && uniform(shared.needs_sums[shared.block_ring.stage(round)]);
    if constexpr (kIsWeights) {
      if (needs_sums) {
        sweep([&](Scores<Shape>& scores, int) {
          float correction[2];
          softmax.advance(scores, unit, correction);
          softmax.find_references(scores, unit, reference);
          scores.for_each([&](float score, int r, int) { softmax.weight(score, r, unit, reference[r]); });
        });
        softmax.finish();
#pragma unroll
        for (int r = 0; r < 2; ++r) factor[r] = softmax.inverse_sum(r);
      } else {
        const float* lse = problem.lse + (static_cast<int64_t>(block.batch) * problem.q_heads + block.q_head) * problem.q_len;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int query = block.first_row + row + fragment_row(r);
          const float value = query < problem.q_len ? lse[query] : 0.0f;
          reference[r] = value == -INFINITY ? 0.0f : value * kLog2e;
        }
      }
    }
    sweep([&](Scores<Shape>& scores, int tile) {
      if constexpr (kIsWeights) {
        if (needs_sums) softmax.find_references(scores, unit, reference);
        scores.for_each([&](float& score, int r, int) { score = exp2_fast(fmaf(score, unit, kWeightLift - reference[r])) * factor[r]; });
      }
      store_scores<Element, Shape, Shape::kScorePlaces>(scores, kIsWeights ? kWeightUnlift : params.score_output.scale,
                                                        shared_address(shared.scores[written++ % Shape::kScorePlaces]),
                                                        params.score_output.map, block, row, tile * Shape::kKeys);
    });
    __syncwarp();
    if (lane_index() == 0) {
      shared.block_ring.release(round);
      shared.query_ring.release(round);
    }
  }
}

template <class Element, class Shape, ScoreWork kScoreWork, bool kIsWeights>
__global__ void __launch_bounds__(Shape::kThreads, 1) score_pass(const __grid_constant__ ForwardParams params) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  ScorePassMemory<Shape>& shared = *reinterpret_cast<ScorePassMemory<Shape>*>(shared_bytes);

  if (threadIdx.x == 0) {
    constexpr int kWarps = Shape::kWarpgroups * 4, kLoaders = 3;
    shared.query_ring.init(1, kWarps);
    shared.key_ring.init(1, Shape::kWarpgroups);
    shared.block_ring.init(1, kWarps + kLoaders);
    publish_barriers_to_copies();
    publish_to_bulk_copies();
  }
  if (threadIdx.x == 32) {
    prefetch_map(params.maps.q);
    prefetch_map(params.maps.k);
    prefetch_map(params.score_output.map);
  }
  __syncthreads();

  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroupThreads, 0) - 1;
  if (warpgroup < 0) {
    shrink_registers<Shape::kLoaderRegisters>();
    if (threadIdx.x == 0) load_keys(shared, params);
    if (threadIdx.x == 32) load_queries(shared, params);
    if (threadIdx.x / 32 == 2) {
      deal_blocks<Shape, kScoreWork>(shared, params, [&](const RowBlock<Shape>& block, int place) {
        __syncwarp();
        const bool needs = kIsWeights && needs_sums<Shape>(params.problem, block.batch, block.q_head, block.first_row);
        if (lane_index() == 0) shared.needs_sums[place] = needs;
      });
    }
    if (threadIdx.x / 32 == 3) fill_invisible_scores<Element, Shape>(shared, params.problem, kIsWeights ? 0.0f : -INFINITY);
  } else {
    grow_registers<Shape::kConsumerRegisters>();
    write_scores<Element, Shape, kScoreWork, kIsWeights>(shared, params, warpgroup);
  }
}

}  // namespace onnx_attn::forward_sm90_kernel
