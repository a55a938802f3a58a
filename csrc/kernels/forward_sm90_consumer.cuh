// forward_sm90_consumer.cuh: a warpgroup of the Hopper forward kernel that computes 64 query rows at a time.
#pragma once

#include <type_traits>

#include "../device/softmax.cuh"
#include "../device/wgmma.cuh"
#include "forward_sm90_block.cuh"
#include "forward_sm90_mask.cuh"
#include "forward_sm90_scores.cuh"

namespace onnx_attn::forward_sm90_kernel {

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

// output += weights V, started.
template <class Element, class Shape>
__device__ __forceinline__ void start_output(Output<Shape>& output, const Weights<Element, Shape>& weights, uint32_t values) {
  const uint64_t value = panel_descriptor(values, Shape::kKeys * kPanelBytes);
  products_begin();
#pragma unroll
  for (int step = 0; step < Shape::kKeys / 16; ++step) {
    multiply_values<Element>(output.value[0], weights.operand[step], value + step * 16 * kPanelBytes / 16);
  }
  products_commit();
}

// Rows of V past the length of a batch entry may hold NaN, and 0 * NaN is NaN. Every warpgroup clears them for itself.
template <class Shape>
__device__ __forceinline__ void clear_values_from(uint8_t* values, int row) {
  constexpr int kChunks = kPanelBytes / 16;
  const int chunks = (Shape::kKeys - row) * kChunks;
#pragma unroll 1
  for (int panel = 0; panel < Shape::kValuePanels; ++panel) {
    const uint32_t start = shared_address(values) + (panel * Shape::kKeys + row) * kPanelBytes;
#pragma unroll 1
    for (int chunk = threadIdx.x % kWarpgroupThreads; chunk < chunks; chunk += kWarpgroupThreads) {
      store_shared_16(start + chunk * 16, make_uint4(0, 0, 0, 0));
    }
  }
  publish_to_bulk_copies();  // warpgroup products read like them
}

// Normalizes the output, brings it to the place of the warpgroup's queries, and starts to store it.
template <class Element, class Shape, class Softmax>
__device__ __forceinline__ void start_store(Output<Shape>& output, const Softmax& softmax, uint32_t place, const CUtensorMap& map,
                                            const Work& work, int first_row, int warpgroup, bool is_leader) {
  const float inverse[2] = {softmax.inverse_sum(0), softmax.inverse_sum(1)};
  // A row without keys may have added 0 * NaN from values that it must not see.
  output.for_each([&](float& value, int row, int) { value = inverse[row] == 0.0f ? 0.0f : value * inverse[row]; });
  meet(kFirstWarpgroup + warpgroup, kWarpgroupThreads);  // all four warps have read their queries
  // Lanes 0-15 name the rows of column tile j, lanes 16-31 those of column tile j + 1.
  const int lane = lane_index(), row = threadIdx.x % kWarpgroupThreads / 32 * 16 + lane % 16;
#pragma unroll
  for (int j = 0; j < Shape::kValueSize / 8; j += 2) {
    const int chunk = (j % 8 + lane / 16) ^ row % 8;
    uint32_t block[4];
    pack_operand<Element>(block, output.value[0][j], output.value[0][j + 1]);
    store_matrices(place + (j / 8 * Shape::kRows + row) * kPanelBytes + chunk * 16, block[0], block[1], block[2], block[3]);
  }
  publish_to_bulk_copies();
  meet(kFirstWarpgroup + warpgroup, kWarpgroupThreads);
  if (is_leader) {
#pragma unroll
    for (int panel = 0; panel < Shape::kValuePanels; ++panel) {
      bulk_store(place + panel * Shape::kRows * kPanelBytes, map, panel * 64, first_row, work.q_head, work.batch);
    }
    bulk_store_commit();
  }
}

template <class Softmax>
__device__ __forceinline__ void store_log_sum_exp(const Problem& problem, const Softmax& softmax, float unit, const Work& work,
                                                  int warp_row) {
  if (!problem.lse || lane_index() % 4 != 0) return;
  float* head = problem.lse + (work.batch * problem.q_heads + work.q_head) * problem.q_len;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = warp_row + fragment_row(r);
    if (row < problem.q_len) head[row] = softmax.log_sum_exp(r, unit);
  }
}

template <class Element, class Shape, ScoreWork kScoreWork>
__device__ __forceinline__ void consume(SharedMemory<Shape>& shared, const ForwardParams& params, int warpgroup) {
  // Output of large heads is corrected under the product with K; at the end of a step that would take too long.
  constexpr bool kCorrectEarly = Shape::kValueSize > 128;
  const Problem& problem = params.problem;
  const float unit = params.transform.unit;
  // Releases what the warpgroup has used up: products finish for all of its warps together.
  const bool is_leader = threadIdx.x % kWarpgroupThreads == 0;
  int used = 0;  // key tiles since launch
  int round = 0;

#pragma unroll 1
  for (int index = blockIdx.x; index < params.blocks; ++round) {
    const RowBlock<Shape> block(params, index);
    const int first_row = block.work.first_row + warpgroup * kWarpgroupRows;
    const int warp_row = first_row + threadIdx.x % kWarpgroupThreads / 32 * 16;
    const TileRange own = block.tiles_of(problem, first_row, kWarpgroupRows);
    const KeyLimits limits(problem, block.position, warp_row);
    const uint32_t queries = shared_address(shared.queries[shared.query_ring.stage(round)]) + warpgroup * kWarpgroupRows * kPanelBytes;
    const auto keys = [&](int count) { return shared_address(shared.keys[shared.key_ring.stage(count)]); };
    const auto values = [&](int count) { return shared_address(shared.values[shared.value_ring.stage(count)]); };

    Output<Shape> output;
    RunningSoftmax<2> softmax;
    Weights<Element, Shape> weights;
    float correction[2] = {1.0f, 1.0f};
    bool must_correct = false;
    output.clear();
    MaskReader<Element, Shape, kScoreWork> mask(params, block.work, warp_row);

    const auto skip = [&] {  // a tile that only other warpgroups visit
      shared.key_ring.wait_full(used);
      shared.value_ring.wait_full(used);
      if (is_leader) {
        shared.key_ring.release(used);
        shared.value_ring.release(used);
      }
      meet(kFirstWarpgroup + warpgroup, kWarpgroupThreads);  // else a warp could fall behind by both parities of a barrier
      ++used;
    };
    // With two places for Q: the output of the block before, which left through the other one, has long been read.
    const auto release_previous_queries = [&] {
      if (Shape::kQueryStages == 1 || !is_leader || round == 0) return;
      bulk_store_wait_read();
      shared.query_ring.release(round - 1);
    };
    const auto correct_output = [&] {
      if (must_correct) output.for_each([&](float& value, int row, int) { value *= correction[row]; });
    };
    // Scores become weights.
    const auto weigh = [&](Scores<Shape>& scores, int tile, auto at_edge) __attribute__((always_inline)) {
      const int first_key = tile * Shape::kKeys;
      mask.apply(scores, limits, first_key, tile > own.begin, at_edge);
      if constexpr (decltype(at_edge)::value) limits.replace_others<Shape>(scores, first_key, -INFINITY);
      must_correct = softmax.advance(scores, unit, correction);
      const float reference[2] = {softmax.reference(0, unit), softmax.reference(1, unit)};
      scores.for_each([&](float& score, int row, int) { score = softmax.weight(score, row, unit, reference[row]); });
    };
    // Scores of a tile are computed, and become weights, while the tile before is added to the output.
    const auto visit = [&](int tile, auto at_edge) __attribute__((always_inline)) {
      Scores<Shape> scores;
      shared.key_ring.wait_full(used);
      start_scores<Element, Shape>(scores, queries, keys(used));
      if constexpr (kCorrectEarly) correct_output();
      shared.value_ring.wait_full(used - 1);
      start_output<Element, Shape>(output, weights, values(used - 1));
      products_wait<1>();
      if (is_leader) shared.key_ring.release(used);
      weigh(scores, tile, at_edge);
      if constexpr (Shape::kHoldExponentials)
        hold_exponentials(softmax.row_sum[0] + softmax.row_sum[1], shared_address(&shared.never_written));
      products_wait<0>();
      if (is_leader) shared.value_ring.release(used - 1);
      weights.pack(scores);
      if constexpr (!kCorrectEarly) correct_output();
      ++used;
    };

    int tile = block.tiles.end - 1;
#pragma unroll 1
    for (; tile >= max(own.end, block.tiles.begin); --tile) skip();
    shared.query_ring.wait_full(round);
    if (own.begin < own.end) {
      {
        Scores<Shape> scores;
        shared.key_ring.wait_full(used);
        start_scores<Element, Shape>(scores, queries, keys(used));
        mask.read_first(tile * Shape::kKeys);
        products_wait<0>();
        if (is_leader) shared.key_ring.release(used);
        weigh(scores, tile, std::true_type());
        weights.pack(scores);
        must_correct = false;
        const int valid_rows = static_cast<int>(block.position.length - tile * Shape::kKeys);
        if (valid_rows < Shape::kKeys && block.position.length < problem.kv_len) {
          shared.value_ring.wait_full(used);
          clear_values_from<Shape>(shared.values[shared.value_ring.stage(used)], valid_rows);
          meet(kFirstWarpgroup + warpgroup, kWarpgroupThreads);
        }
        --tile;
        ++used;
      }
      release_previous_queries();
#pragma unroll 1
      for (int edge = 0; edge < 2; ++edge) {  // the ragged end and the diagonal, the interior; and then the left edge of a window
        const int edge_begin = edge == 0 ? own.whole_end : own.begin;
#pragma unroll 1
        for (; tile >= edge_begin; --tile) visit(tile, std::true_type());
#pragma unroll 1
        for (; tile >= own.whole_begin; --tile) visit(tile, std::false_type());
      }
      if constexpr (kCorrectEarly) correct_output();
      shared.value_ring.wait_full(used - 1);
      start_output<Element, Shape>(output, weights, values(used - 1));
      products_wait<0>();
      if (is_leader) shared.value_ring.release(used - 1);
    } else {
      release_previous_queries();
    }
#pragma unroll 1
    for (; tile >= block.tiles.begin; --tile) skip();

    softmax.finish();
    store_log_sum_exp(problem, softmax, unit, block.work, warp_row);
    start_store<Element, Shape>(output, softmax, queries, params.maps.y, block.work, first_row, warpgroup,
                                is_leader && first_row < problem.q_len);
    if (Shape::kQueryStages == 1 && is_leader) {
      bulk_store_wait_read();
      shared.query_ring.release(round);
    }
    index = __shfl_sync(~0u, following_block(shared, params, index, round), 0);  // uniform, and read by every lane
    if (params.next_block && lane_index() == 0) shared.block_ring.release(round);
  }
  if (is_leader) bulk_store_wait();  // shared memory must outlive the stores
}

}  // namespace onnx_attn::forward_sm90_kernel
