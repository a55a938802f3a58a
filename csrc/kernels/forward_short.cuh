// forward_short.cuh: attention forward for Hopper where whole heads fit into shared memory.
//
// A thread block goes through heads. One warpgroup brings them into slots of shared memory, as far ahead as there are slots; the others
// compute 64 query rows of a head at a time, in turn: the scores of a tile of keys are one product, stay in registers, become weights and
// meet V; output leaves through the place of Q. Nothing of a head is pipelined: the warpgroups are at different points of their work, and
// hide each other's exponentials and stores. Where every head has a slot of its own, the warpgroup that brings them computes as well once
// they are on their way.
#pragma once

#include "forward_short_load.cuh"

namespace onnx_attn::forward_short_kernel {

static_assert(kBlockRows == kWarpgroupRows);

template <int kHeadSize_>
struct TileShape {
  static constexpr int kHeadSize = kHeadSize_;
  static constexpr int kValueSize = kHeadSize_;
  static constexpr int kKeys = kTileKeys;
  static constexpr int kRows = kWarpgroupRows;
  static constexpr int kPanels = kHeadSize / 64;
  static constexpr int kWarpgroups = warpgroups_of(kHeadSize);
  static_assert(kHeadSize % 64 == 0);
};

// A warp's rows, from the place where stage_output left them.
template <class Element, class Shape>
__device__ __forceinline__ void store_rows(uint32_t place, Element* target, int64_t row_stride, int rows, int columns) {
  constexpr uint32_t kChunks = 8, kStep = 32 / kChunks;
  const uint32_t lane = forget_origin(lane_index()), chunk = lane % kChunks;
  const uint32_t first_row = threadIdx.x % kWarpgroupThreads / 32 * 16 + lane / kChunks;
  target += first_row * row_stride + chunk * 8;
  place += first_row * kPanelBytes + (chunk ^ first_row % 8) * 16;
#pragma unroll
  for (int panel = 0; panel < Shape::kPanels; ++panel) {
    uint4 packed[16 / kStep];
#pragma unroll
    for (int i = 0; i < 16; i += kStep) packed[i / kStep] = load_shared_16((place ^ i % 8 * 16) + (panel * Shape::kRows + i) * kPanelBytes);
#pragma unroll
    for (int i = 0; i < 16; i += kStep) {
      const bool exists = static_cast<int>(first_row) + i < rows && panel * 64 + static_cast<int>(chunk) * 8 < columns;
      if (exists) store_global_16(target + i * row_stride + panel * 64, packed[i / kStep]);
    }
  }
}

// Computes 64 rows of the head in a slot, from `row_block` on.
template <class Element, class Shape, bool kHasKeyRow>
__device__ __forceinline__ void compute_rows(const Block<Shape>& block, const ForwardParams& params, const SlotCursor& at, int row_block) {
  const Problem& problem = params.problem;
  const HeadLayout& layout = block.layout;
  HeadWork& work = block.work[at.slot];
  const auto wait_for_copies = [&](uint64_t& barrier) {
    barrier_wait(shared_address(&barrier), at.parity);
    publish_to_bulk_copies();
  };
  const TileRange tiles = unpack_tiles(uniform(work.tiles[row_block]));
  const bool has_addend = kHasKeyRow && uniform(work.has_addend);  // a head of which every key is kept costs nothing more
  const float unit = has_addend ? kLog2e : params.raw_unit;
  const int first_row = row_block * Shape::kRows, warp_row = threadIdx.x % kWarpgroupThreads / 32 * 16;
  const uint32_t place = block.place(at.slot), queries = place + row_block * layout.query_bytes();
  SteadySoftmax<2> softmax;
  Output<Shape> output;
  wait_for_copies(work.keys_full);
  if (tiles.begin == tiles.end) wait_for_copies(work.values_full);  // no slot is given back before its copies are over
#pragma unroll 1
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    Scores<Shape> scores;
    start_scores<Element, Shape>(scores, queries, place + layout.keys() + tile * layout.tile_bytes());
    products_wait<0>();
    if (kHasKeyRow && has_addend) add_key_row<Shape>(scores, place + layout.key_row() + tile * kTileKeys * 4, params.scale);
    if (!tiles.is_whole(tile)) work.limits.exclude_others<Shape>(scores, first_row + warp_row, tile * kTileKeys);
    float tile_max[2];
    if (softmax.must_move(scores, tile_max)) {
      float correction[2];
      const bool must_correct = softmax.move_to(tile_max, scores, unit, correction) && tile > tiles.begin;
      if (must_correct) output.for_each([&](float& value, int row, int) { value *= correction[row]; });
    }
    softmax.weigh(scores, unit);
    Weights<Element, Shape> weights;
    weights.pack(scores);
    if (tile == tiles.begin) wait_for_copies(work.values_full);
    start_output<Element, Shape>(output, weights, place + layout.values() + tile * layout.tile_bytes(), tile > tiles.begin);
    products_wait<0>();
  }

  softmax.finish();
  store_log_sum_exp(problem, softmax, unit, 0, work.head, first_row + warp_row);
  const bool is_empty[2] = {softmax.is_empty(0), softmax.is_empty(1)};
  if (__any_sync(~0u, is_empty[0] || is_empty[1])) {  // such a row may have added 0 * NaN from values that it must not see
    output.for_each([&](float& value, int row, int) { value = is_empty[row] ? 0.0f : value; });
  }
  const auto inverse_sum = [&](int row) { return is_empty[row] ? 0.0f : reciprocal_fast(softmax.row_sum[row]); };
  const float inverse[2] = {inverse_sum(0), inverse_sum(1)};
  stage_output<Element, Shape, false>(output, inverse, queries);
  __syncwarp();
  store_rows<Element, Shape>(queries, static_cast<Element*>(work.y) + first_row * problem.y.row_stride, problem.y.row_stride,
                             static_cast<int>(problem.q_len) - first_row, static_cast<int>(problem.v_head_size));
}

// Computes the blocks of rows whose turn it is. Every warpgroup takes note of every head and gives its slot back, whether it has rows of
// it or not: a barrier is never more than a phase ahead of who waits for it.
template <class Element, class Shape, bool kHasKeyRow>
__device__ __forceinline__ void compute_heads(const Block<Shape>& block, const ForwardParams& params, int warpgroup) {
  SlotCursor at;
  int row_block = warpgroup;
#pragma unroll 1
  for (int head = blockIdx.x; head < params.plan.heads; head += params.plan.blocks, at.advance(params.plan.slots)) {
    HeadWork& work = block.work[at.slot];
    barrier_wait(shared_address(&work.prepared), at.parity);
#pragma unroll 1
    for (; row_block < block.layout.row_blocks; row_block += params.plan.computing) {
      compute_rows<Element, Shape, kHasKeyRow>(block, params, at, row_block);
    }
    row_block -= block.layout.row_blocks;
    __syncwarp();
    if (lane_index() == 0) barrier_arrive(shared_address(&work.empty));
  }
}

// kHasKeyRow: there is a tensor mask, or padding, or a scale that no exponent can hold.
template <class Element, class Shape, bool kHasKeyRow>
__global__ void __launch_bounds__(Shape::kWarpgroups* kWarpgroupThreads, 1) forward(const __grid_constant__ ForwardParams params) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  const Block<Shape> block(shared_bytes, params.plan);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the shuffle tells ptxas that it is uniform
  const int warpgroup = warp / 4;

  // Copies start before there are barriers: whoever waits for one has nothing to do yet.
  if (warpgroup < Shape::kWarpgroups - 1) {
    if (warp < params.plan.slots && lane_index() == 0) {
      HeadWork& work = block.work[warp];
      barrier_init(shared_address(&work.prepared), 1);
      barrier_init(shared_address(&work.keys_full), kCopyWarps * 32);
      barrier_init(shared_address(&work.values_full), kCopyWarps * 32);
      barrier_init(shared_address(&work.empty), params.plan.computing * 4);
    }
    __syncthreads();
  } else if (warp % 4 < kCopyWarps) {
    copy_heads<Element>(block, params);
  } else {
    prepare_heads<Element, Shape, kHasKeyRow>(block, params);
  }
  if (warpgroup < params.plan.computing) compute_heads<Element, Shape, kHasKeyRow>(block, params, warpgroup);
  copy_async_commit();
  copy_async_wait<0>();  // no thread leaves before its copies, which others wait for
}

}  // namespace onnx_attn::forward_short_kernel
