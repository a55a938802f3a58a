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
  // The first scores of a block are computed beside the last product of the one before.
  constexpr bool kJoinsBlocks = Shape::kQueryStages > 1;
  constexpr bool kMayBeCapped = kScoreWork == ScoreWork::cap || kScoreWork == ScoreWork::masks;
  // Where registers are short: limits of a first tile are applied whether they exclude anything or not.
  constexpr bool kAlwaysLimits = kScoreWork == ScoreWork::bias && Shape::kWarpgroups == 3;
  // Where registers are shortest, references are not kept from tile to tile: every tile is taken for one that moves them.
  constexpr bool kKeepsReferences =
      Shape::kValueSize <= 128 || kScoreWork == ScoreWork::none || (kScoreWork == ScoreWork::cap && Shape::kValueSize == 256);
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
  SteadySoftmax<2> softmax;
  Weights<Element, Shape> weights;
  MaskReader<Element, Shape, kScoreWork> mask(shared, params);
  bool has_output = false;  // of this block
  int used = 0;             // key tiles since launch
  int owed = -1;            // the tile whose weights, the last ones of the block before, have not met V; -1: none
  int to_pass = 0;          // tiles that only other warpgroups visit, and ...
  int masks_to_pass = 0;

  const auto correct_output = [&](const float (&correction)[2]) {
    output.for_each([&](float& value, int row, int) { value *= correction[row]; });
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
      own = block.own_tiles(warpgroup);
      tile = uniform(block.tiles.end) - 1;
      tiles_begin = uniform(block.tiles.begin);
    }
    const bool is_empty = own.begin >= own.end;
    const int ahead = tile + 1 - (is_empty ? tiles_begin : own.end);
    to_pass += ahead;
    if (has_mask(kScoreWork) && !is_last && block.has_mask_tiles) masks_to_pass += ahead;

    // may_be_edge: limits may exclude some of the scores.
    const auto transform = [&](Scores<Shape>& scores, int tile, auto may_be_edge) __attribute__((always_inline)) {
      const int tile_key = tile * Shape::kKeys;
      const bool is_edge = decltype(may_be_edge)::value && (kAlwaysLimits || !own.is_whole(tile));
      if (is_edge && kMayBeCapped) KeyLimits(block, row, tile_key).template replace_others<Shape>(scores, 0.0f);
      mask.apply(scores, block, row, tile_key);
      if (is_edge) KeyLimits(block, row, tile_key).template replace_others<Shape>(scores, -INFINITY);
      if constexpr (Shape::kWritesScores) {
        const ScoreOutput& out = params.score_output;
        store_scores<Element, Shape, 1>(scores, out.scale, shared_address(shared.scores), out.map, block, row, tile_key);
      }
    };
    const auto must_move = [&](Scores<Shape>& scores, float (&tile_max)[2]) __attribute__((always_inline)) {
      if constexpr (kKeepsReferences) return softmax.must_move(scores, tile_max);
      softmax.find_maxima(scores, tile_max);
      return true;
    };
    // Scores become weights. True when earlier output is to be multiplied by the correction.
    const auto weigh = [&](Scores<Shape>& scores, int tile, float (&correction)[2]) __attribute__((always_inline)) {
      transform(scores, tile, std::true_type());
      float tile_max[2];
      const bool moved = must_move(scores, tile_max) && softmax.move_to(tile_max, scores, unit, correction);
      softmax.weigh(scores, unit);
      return moved;
    };
    // A visit: scores of a tile are computed, and become weights, while the tile before is added to the output.
    const auto start_visit = [&](Scores<Shape>& scores) __attribute__((always_inline)) {
      shared.key_ring.wait_full(used);
      start_scores<Element, Shape>(scores, queries(round), keys(used));
      shared.value_ring.wait_full(used - 1);
      start_output<Element, Shape>(output, weights, values(used - 1), has_output);
      has_output = true;
      products_wait<1>();
      if (is_leader) shared.key_ring.release(used);
    };
    const auto finish_visit = [&](const Scores<Shape>& scores) __attribute__((always_inline)) {
      if constexpr (Shape::kHoldExponentials)
        hold_exponentials(softmax.row_sum[0] + softmax.row_sum[1], shared_address(&shared.never_written));
      products_wait<0>();
      if (is_leader) shared.value_ring.release(used - 1);
      weights.pack(scores);
      ++used;
    };
    const auto visit_edge = [&](int tile) __attribute__((always_inline)) {
      Scores<Shape> scores;
      float correction[2];
      start_visit(scores);
      const bool moved = weigh(scores, tile, correction);
      finish_visit(scores);
      if (moved) correct_output(correction);
    };
    // Visits whole tiles until one moves a reference, as hardly any does, so that the others do not even jump over the code for that.
    // Returns the next tile.
    const auto visit_whole = [&](int tile) __attribute__((always_inline)) {
      Scores<Shape> scores;
      float tile_max[2];
#pragma unroll 1
      for (;; --tile) {
        start_visit(scores);
        transform(scores, tile, std::false_type());
        if (must_move(scores, tile_max)) break;
        softmax.weigh(scores, unit);
        finish_visit(scores);
        if (tile == own.whole_begin) return tile - 1;
      }
      float correction[2];
      const bool moved = softmax.move_to(tile_max, scores, unit, correction);
      softmax.weigh(scores, unit);
      finish_visit(scores);
      if (moved) correct_output(correction);
      return tile - 1;
    };
    // Visits the first tile of a block while the last one of the block before is added to its output, if that is owed.
    const auto visit_first = [&](int tile, auto is_owed) __attribute__((always_inline)) {
      constexpr bool kIsOwed = decltype(is_owed)::value;
      Scores<Shape> scores;
      shared.key_ring.wait_full(used);
      start_scores<Element, Shape>(scores, queries(round), keys(used));
      if constexpr (kIsOwed) {
        shared.value_ring.wait_full(owed);
        start_output<Element, Shape>(output, weights, values(owed), has_output);
      }
      products_wait<kIsOwed>();
      if (is_leader) shared.key_ring.release(used);
      const float inverse[2] = {softmax.inverse_sum(0), softmax.inverse_sum(1)};
      softmax = SteadySoftmax<2>();
      float correction[2];  // there is no output yet
      weigh(scores, tile, correction);
      if constexpr (kIsOwed) {
        if constexpr (Shape::kHoldExponentials)
          hold_exponentials(softmax.row_sum[0] + softmax.row_sum[1], shared_address(&shared.never_written));
        products_wait<0>();
        if (is_leader) shared.value_ring.release(owed);
      }
      weights.pack(scores);
      if constexpr (kIsOwed) finish_block(inverse, round - 1);
      has_output = false;
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
        for (; tile >= edge_begin; --tile) visit_edge(tile);
#pragma unroll 1
        while (tile >= own.whole_begin) tile = visit_whole(tile);
      }
      owed = used - 1;
      to_pass = own.begin - tiles_begin;
      if (has_mask(kScoreWork) && block.has_mask_tiles) masks_to_pass = to_pass;
      softmax.finish();
    } else {
      softmax = SteadySoftmax<2>();
      finish_block({0.0f, 0.0f}, round);
    }
    store_log_sum_exp(params.problem, softmax, unit, block.batch, block.q_head, block.first_row + row);
    __syncwarp();
    if (lane_index() == 0) shared.block_ring.release(round);
  }
}

}  // namespace onnx_attn::forward_sm90_kernel
