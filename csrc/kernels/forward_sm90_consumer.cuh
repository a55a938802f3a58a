// forward_sm90_consumer.cuh: a warpgroup of the Hopper forward kernel that computes 64 query rows at a time.
#pragma once

#include <type_traits>

#include "forward_sm90_block.cuh"
#include "forward_sm90_mask.cuh"
#include "forward_sm90_score_output.cuh"

namespace onnx_attn::forward_sm90_kernel {

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

// Normalizes a warp's output and leaves it at `place`, where the warpgroup's queries were, for the thread that stores it.
template <class Element, class Shape>
__device__ __forceinline__ void hand_over(const Output<Shape>& output, const float (&inverse)[2], uint32_t place, uint32_t barrier) {
  stage_output<Element, Shape>(output, inverse, place);
  publish_to_bulk_copies();
  __syncwarp();
  if (lane_index() == 0) barrier_arrive(barrier);
}

template <class Element, class Shape, ScoreWork kScoreWork>
__device__ __forceinline__ void consume(SharedMemory<Shape>& shared, const ForwardParams& params, int warpgroup) {
  // Output of large heads is corrected under the product with K; at the end of a step that would take too long.
  constexpr bool kCorrectEarly = Shape::kValueSize > 128;
  // The first scores of a block are computed beside the last product of the one before.
  constexpr bool kJoinsBlocks = Shape::kQueryStages > 1;
  constexpr bool kMayBeCapped = kScoreWork == ScoreWork::cap || kScoreWork == ScoreWork::masks;
  // Where registers are short: limits of a first tile are applied whether they exclude anything or not.
  constexpr bool kAlwaysLimits = kScoreWork == ScoreWork::bias && Shape::kWarpgroups == 3;
  const float unit = params.transform.unit;
  const int row = warpgroup * kWarpgroupRows + threadIdx.x % kWarpgroupThreads / 32 * 16;  // of the warp, in a block
  // Releases what the warpgroup has used up: products finish for all of its warps together.
  const bool is_leader = threadIdx.x % kWarpgroupThreads == 0;
  const auto keys = [&](int count) { return shared_address(shared.keys[shared.key_ring.stage(count)]); };
  const auto values = [&](int count) { return shared_address(shared.values[shared.value_ring.stage(count)]); };
  const auto queries = [&](int round) {
    const uint32_t place = shared_address(shared.queries[shared.query_ring.stage(round)]) + warpgroup * kWarpgroupRows * kPanelBytes;
    return kScoreWork == ScoreWork::masks ? forget_origin(place) : place;  // no registers are left for descriptors
  };

  Output<Shape> output;
  RunningSoftmax<2> softmax;
  Weights<Element, Shape> weights;
  MaskReader<Element, Shape, kScoreWork> mask(shared, params);
  float correction[2] = {1.0f, 1.0f};
  bool has_output = false;  // of this block
  bool must_correct = false;
  int used = 0;     // key tiles since launch
  int owed = -1;    // the tile whose weights, the last ones of the block before, have not met V; -1: none
  int to_pass = 0;  // tiles that only other warpgroups visit, and ...
  int masks_to_pass = 0;

  const auto correct_output = [&] {
    if (must_correct) output.for_each([&](float& value, int row, int) { value *= correction[row]; });
  };
  const auto finish_block = [&](const float (&inverse)[2], int round) {
    hand_over<Element, Shape>(output, inverse, queries(round), shared_address(&shared.output_full[shared.query_ring.stage(round)]));
  };

#pragma unroll 1
  for (int round = 0;; ++round) {
    shared.block_ring.wait_full(round);
    const RowBlock<Shape>& block = shared.blocks[shared.block_ring.stage(round)];
    const bool is_last = uniform(block.first_row) == RowBlock<Shape>::kNoRow;
    TileRange own{0, 0, 0, 0};
    int tile = -1, tiles_begin = 0;
    if (!is_last) {
      own.begin = uniform(block.own[warpgroup].begin);
      own.whole_begin = uniform(block.own[warpgroup].whole_begin);
      own.whole_end = uniform(block.own[warpgroup].whole_end);
      own.end = uniform(block.own[warpgroup].end);
      tile = uniform(block.tiles.end) - 1;
      tiles_begin = uniform(block.tiles.begin);
    }
    const bool is_empty = own.begin >= own.end;
    const int ahead = tile + 1 - (is_empty ? tiles_begin : own.end);
    to_pass += ahead;
    if (has_mask(kScoreWork) && !is_last && block.has_mask_tiles) masks_to_pass += ahead;

    // Scores become weights. may_be_edge: limits may exclude some of them.
    const auto weigh = [&](Scores<Shape>& scores, int tile, auto may_be_edge) __attribute__((always_inline)) {
      const int tile_key = tile * Shape::kKeys;
      const bool is_edge = decltype(may_be_edge)::value && (kAlwaysLimits || !own.is_whole(tile));
      if (is_edge && kMayBeCapped) KeyLimits(block, row, tile_key).template replace_others<Shape>(scores, 0.0f);
      mask.apply(scores, block, row, tile_key);
      if (is_edge) KeyLimits(block, row, tile_key).template replace_others<Shape>(scores, -INFINITY);
      if constexpr (Shape::kWritesScores) {
        const ScoreOutput& out = params.score_output;
        store_scores<Element, Shape, 1>(scores, out.scale, shared_address(shared.scores), out.map, block, row, tile_key);
      }
      must_correct = softmax.advance(scores, unit, correction);
      float reference[2];
      softmax.find_references(scores, unit, reference);
      scores.for_each([&](float& score, int row, int) { score = softmax.weight(score, row, unit, reference[row]); });
    };
    // Scores of a tile are computed, and become weights, while the tile before is added to the output.
    const auto visit = [&](int tile, auto is_edge) __attribute__((always_inline)) {
      Scores<Shape> scores;
      shared.key_ring.wait_full(used);
      start_scores<Element, Shape>(scores, queries(round), keys(used));
      if constexpr (kCorrectEarly) correct_output();
      shared.value_ring.wait_full(used - 1);
      start_output<Element, Shape>(output, weights, values(used - 1), has_output);
      has_output = true;
      products_wait<1>();
      if (is_leader) shared.key_ring.release(used);
      weigh(scores, tile, is_edge);
      if constexpr (Shape::kHoldExponentials)
        hold_exponentials(softmax.row_sum[0] + softmax.row_sum[1], shared_address(&shared.never_written));
      products_wait<0>();
      if (is_leader) shared.value_ring.release(used - 1);
      weights.pack(scores);
      if constexpr (!kCorrectEarly) correct_output();
      ++used;
    };
    // The same for the first tile of a block and the last one of the block before, if that is owed.
    const auto visit_first = [&](int tile, auto is_owed) __attribute__((always_inline)) {
      constexpr bool kIsOwed = decltype(is_owed)::value;
      Scores<Shape> scores;
      shared.key_ring.wait_full(used);
      start_scores<Element, Shape>(scores, queries(round), keys(used));
      if constexpr (kIsOwed) {
        if constexpr (kCorrectEarly) correct_output();
        shared.value_ring.wait_full(owed);
        start_output<Element, Shape>(output, weights, values(owed), has_output);
      }
      products_wait<kIsOwed>();
      if (is_leader) shared.key_ring.release(used);
      const float inverse[2] = {softmax.inverse_sum(0), softmax.inverse_sum(1)};
      softmax = RunningSoftmax<2>();
      weigh(scores, tile, std::true_type());
      if constexpr (kIsOwed) {
        if constexpr (Shape::kHoldExponentials)
          hold_exponentials(softmax.row_sum[0] + softmax.row_sum[1], shared_address(&shared.never_written));
        products_wait<0>();
        if (is_leader) shared.value_ring.release(owed);
      }
      weights.pack(scores);
      if constexpr (kIsOwed) finish_block(inverse, round - 1);
      has_output = must_correct = false;
      const int valid_rows = block.length - tile * Shape::kKeys;
      if (valid_rows < Shape::kKeys && block.length < params.problem.kv_len) {
        shared.value_ring.wait_full(used);
        clear_values_from<Shape>(shared.values[shared.value_ring.stage(used)], valid_rows);
        meet(kFirstWarpgroup + warpgroup, kWarpgroupThreads);
      }
      ++used;
    };

    // A debt is paid at once where there is no first tile to do it beside, or where it would hold too many places of the ring.
    if (owed >= 0 && (is_empty || !kJoinsBlocks || used + to_pass - owed > Shape::kStages)) {
      if constexpr (kCorrectEarly) correct_output();
      shared.value_ring.wait_full(owed);
      start_output<Element, Shape>(output, weights, values(owed), has_output);
      products_wait<0>();
      if (is_leader) shared.value_ring.release(owed);
      finish_block({softmax.inverse_sum(0), softmax.inverse_sum(1)}, round - 1);
      owed = -1;
    }
#pragma unroll 1
    for (; to_pass > 0; --to_pass, ++used) {
      shared.key_ring.wait_full(used);
      shared.value_ring.wait_full(used);
      meet(kFirstWarpgroup + warpgroup, kWarpgroupThreads);  // a warp that came later could find the place filled again
      if (is_leader) {
        shared.key_ring.release(used);
        shared.value_ring.release(used);
      }
      if (has_mask(kScoreWork) && masks_to_pass > 0) {
        mask.pass();
        --masks_to_pass;
      }
    }
    if (is_last) {
      if constexpr (Shape::kWritesScores) wait_for_scores();
      return;
    }

    shared.query_ring.wait_full(round);
    if (!is_empty) {
      tile = own.end - 1;
      if (kJoinsBlocks && owed >= 0)
        visit_first(tile--, std::bool_constant<kJoinsBlocks>());
      else
        visit_first(tile--, std::false_type());
#pragma unroll 1
      for (int edge = 0; edge < 2; ++edge) {  // the ragged end and the diagonal, the interior; and then the left edge of a window
        const int edge_begin = edge == 0 ? own.whole_end : own.begin;
#pragma unroll 1
        for (; tile >= edge_begin; --tile) visit(tile, std::true_type());
#pragma unroll 1
        for (; tile >= own.whole_begin; --tile) visit(tile, std::false_type());
      }
      owed = used - 1;
      to_pass = own.begin - tiles_begin;
      if (has_mask(kScoreWork) && block.has_mask_tiles) masks_to_pass = to_pass;
      softmax.finish();
    } else {
      softmax = RunningSoftmax<2>();
      finish_block({0.0f, 0.0f}, round);
    }
    store_log_sum_exp(params.problem, softmax, unit, block.batch, block.q_head, block.first_row + row);
    __syncwarp();
    if (lane_index() == 0) shared.block_ring.release(round);
  }
}

}  // namespace onnx_attn::forward_sm90_kernel
