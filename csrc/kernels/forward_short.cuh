// forward_short.cuh: attention forward for Hopper where whole heads fit into shared memory.
//
// A thread block asks for Q, K and V of all of its heads at once, the first one first. Its warpgroups compute 64 query rows of a head at
// a time, in turn: the scores of a tile of keys are one product, stay in registers, become weights and meet V; output leaves through
// the place of Q. Nothing of it is pipelined: the warpgroups of a multiprocessor are at different points of their work, and hide each
// other's copies, exponentials and stores.
#pragma once

#include "../device/block_work.cuh"
#include "../device/warpgroup_tile.cuh"
#include "forward_short_params.h"

namespace onnx_attn::forward_short_kernel {

using namespace device;
static_assert(kBlockRows == kWarpgroupRows);

template <int kHeadSize_>
struct TileShape {
  static constexpr int kHeadSize = kHeadSize_;
  static constexpr int kValueSize = kHeadSize_;
  static constexpr int kKeys = tile_keys(kHeadSize);
  static constexpr int kRows = kWarpgroupRows;
  static constexpr int kPanels = kHeadSize / 64;
  static_assert(kHeadSize % 64 == 0);
};

// Whose turn it is to copy the next 64 rows.
struct CopyTurn {
  int warpgroups, warpgroup, next = 0;

  // Starts copying 64 rows after another into blocks of kRows rows; rows at or past `end` are not read and become zeros.
  template <int kPanels, int kRows, class Element>
  __device__ __forceinline__ void copy_rows(uint32_t target, const Element* source, int64_t row_stride, int first, int last, int end,
                                            int columns) {
    constexpr int kChunks = 8, kStep = kWarpgroupThreads / kChunks;  // chunks of 8 elements, in a panel
    const int thread = threadIdx.x % kWarpgroupThreads, chunk = thread % kChunks, thread_row = thread / kChunks;
    target += thread_row * kPanelBytes + (chunk ^ thread_row % 8) * 16;
    source += chunk * 8;
#pragma unroll 1
    for (int row = first; row < last; row += kWarpgroupRows) {
      const bool is_mine = next == warpgroup;
      next = next + 1 == warpgroups ? 0 : next + 1;
      if (!is_mine) continue;
      const uint32_t place = target + (row + row / kRows * ((kPanels - 1) * kRows)) * kPanelBytes;
      const Element* element = source + (row + thread_row) * row_stride;
#pragma unroll
      for (int i = 0; i < kWarpgroupRows; i += kStep, element += kStep * row_stride) {
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
          const bool exists = row + thread_row + i < end && panel * 64 + chunk * 8 < columns;
          copy_async_16(place + (panel * kRows + i) * kPanelBytes, element + panel * 64, exists ? 16 : 0);
        }
      }
    }
  }
};

// What a tensor mask without a query axis and the key padding add to the scores of a key; -inf excludes it.
__device__ __forceinline__ float key_addend(const Problem& problem, int batch, int q_head, int key) {
  const TensorMask& tensor = problem.mask.tensor;
  const Padding& padding = problem.mask.padding;
  float addend = 0.0f;
  if (tensor.kind != TensorMask::Kind::none && key < tensor.columns) {
    const int64_t element = batch * tensor.batch_stride + q_head * tensor.head_stride + key * tensor.key_stride;
    if (tensor.kind == TensorMask::Kind::keep) {
      addend = static_cast<const bool*>(tensor.data)[element] ? 0.0f : -INFINITY;
    } else {
      with_float_type(tensor.dtype, [&](auto type) { addend = bias_as_float(static_cast<const decltype(type)*>(tensor.data)[element]); });
    }
  }
  if (padding.kind != Padding::Kind::none) {
    with_integer_type(padding.dtype, [&](auto type) {
      const auto* data = static_cast<const decltype(type)*>(padding.data) + batch * padding.batch_stride;
      const bool is_kept = padding.kind == Padding::Kind::lengths ? key < static_cast<int64_t>(*data)
                                                                  : key < padding.columns && data[key * padding.key_stride] > 0;
      if (!is_kept) addend += padding.filter;
    });
  }
  return addend;
}

// score * scale + addend. A select: the score of an excluded key may be NaN.
template <class Shape>
__device__ __forceinline__ void add_key_row(Scores<Shape>& scores, uint32_t key_row, float scale) {
  key_row += fragment_column() * 4;
#pragma unroll
  for (int j = 0; j < Shape::kKeys / 8; ++j) {
    const float2 addend = load_shared_pair(key_row + 32 * j);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float* score = &scores.value[0][j][2 * row];
      score[0] = fmaf(score[0], scale, addend.x);
      score[1] = fmaf(score[1], scale, addend.y);
      if (addend.x == -INFINITY) score[0] = -INFINITY;
      if (addend.y == -INFINITY) score[1] = -INFINITY;
    }
  }
}

// Which keys the rows of a head can see: row i sees [begin + i, end + i), and none from key_end on.
struct KeyLimits {
  int begin, end, key_end;

  __device__ __forceinline__ KeyLimits(int begin, int end, int key_end)
      : begin(uniform(begin)), end(uniform(end)), key_end(uniform(key_end)) {}

  __device__ static __forceinline__ KeyLimits of_batch(const ForwardParams& params, int batch) {
    const Mask& mask = params.problem.mask;
    const int length = static_cast<int>(mask.lengths.at(batch, params.problem.kv_len));
    const int offset = mask.offset_follows_length ? length - static_cast<int>(params.problem.q_len) : 0;
    return KeyLimits(params.begin + offset, params.end + offset, min(length, params.columns));
  }

  // See TileRange.
  template <int kKeys>
  __device__ __forceinline__ TileRange visited(int first_row, int end_row) const {
    const int first = max(0, begin + first_row), last = visible_end(end_row);
    if (first >= last) return TileRange{0, 0, 0, 0};
    const int whole_begin = max(0, begin + end_row - 1), whole_end = max(0, min(key_end, end + first_row));
    return TileRange{first / kKeys, (whole_begin + kKeys - 1) / kKeys, whole_end / kKeys, (last + kKeys - 1) / kKeys};
  }
  __device__ __forceinline__ int visible_end(int end_row) const { return max(0, min(key_end, end + end_row - 1)); }

  // `row`: of the warp, in the head. `tile_key`: the first key of the tile.
  template <class Shape>
  __device__ __forceinline__ void exclude_others(Scores<Shape>& scores, int row, int tile_key) const {
    const int column = tile_key + fragment_column();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int first = begin + row + fragment_row(r) - column, last = min(end + row + fragment_row(r), key_end) - column;
      replace_outside<Shape>(scores, r, first, last, -INFINITY);
    }
  }
};

// A warp's rows, from the place where stage_output left them.
template <class Element, class Shape>
__device__ __forceinline__ void store_rows(const uint8_t* place, Element* target, int64_t row_stride, int rows, int columns) {
  constexpr int kChunks = 8, kStep = 32 / kChunks;
  const int lane = static_cast<int>(forget_origin(lane_index())), chunk = lane % kChunks;
  const int first_row = threadIdx.x % kWarpgroupThreads / 32 * 16 + lane / kChunks;
  target += first_row * row_stride + chunk * 8;
#pragma unroll
  for (int i = 0; i < 16; i += kStep, target += kStep * row_stride) {
    const int row = first_row + i;
#pragma unroll
    for (int panel = 0; panel < Shape::kPanels; ++panel) {
      const uint4 packed = *reinterpret_cast<const uint4*>(place + (panel * Shape::kRows + row) * kPanelBytes + (chunk ^ row % 8) * 16);
      if (row < rows && panel * 64 + chunk * 8 < columns) *reinterpret_cast<uint4*>(target + panel * 64) = packed;
    }
  }
}

// A head of a thread block, in shared memory.
struct HeadWork {
  uint64_t keys_full, values_full;  // barriers: Q and K are there; V is
  int batch, q_head;
  int begin, end, key_end;  // of KeyLimits
  int has_addend;           // something has to be added to the scores of a key, or they have to be scaled
};
static_assert(kMostHeads * sizeof(HeadWork) <= kControlBytes);

// kHasKeyRow: there is a tensor mask, or padding, or a scale that no exponent can hold.
template <class Element, class Shape, bool kHasKeyRow>
__global__ void __launch_bounds__(kMostWarpgroups* kWarpgroupThreads, 1) forward(const __grid_constant__ ForwardParams params) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  const Problem& problem = params.problem;
  const HeadLayout layout{Shape::kHeadSize, params.plan.layout.row_blocks, params.plan.layout.tiles};
  HeadWork* work = reinterpret_cast<HeadWork*>(shared_bytes + params.plan.heads * layout.bytes());
  const int first_head = blockIdx.x * params.plan.heads, heads = min(params.plan.heads, params.heads - first_head);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroupThreads, 0);  // the shuffle tells ptxas that it is uniform
  const int q_len = static_cast<int>(problem.q_len);

  if (threadIdx.x < heads) {
    barrier_init(shared_address(&work[threadIdx.x].keys_full), blockDim.x);
    barrier_init(shared_address(&work[threadIdx.x].values_full), blockDim.x);
    publish_barriers_to_copies();
  }
  CopyTurn turn{params.plan.warpgroups, warpgroup};
#pragma unroll 1
  for (int i = 0; i < heads; ++i) {
    const int batch = params.q_heads.divide(first_head + i), q_head = first_head + i - batch * static_cast<int>(problem.q_heads);
    const int kv_head = params.group.divide(q_head);
    const uint32_t place = shared_address(shared_bytes) + i * layout.bytes();
    turn.copy_rows<Shape::kPanels, Shape::kRows>(place, head_rows<const Element>(problem.q, batch, q_head), problem.q.row_stride, 0,
                                                 layout.row_blocks * Shape::kRows, q_len, static_cast<int>(problem.head_size));
    if (i == 0) __syncthreads();  // the barriers are made
    const KeyLimits limits = KeyLimits::of_batch(params, batch);
    const TileRange tiles = limits.visited<Shape::kKeys>(0, q_len);
    const int visible_end = limits.visible_end(q_len);  // rows of K and V from here on may hold NaN
    const auto copy_tiles = [&](uint32_t target, const Tensor4& tensor, int64_t columns) {
      turn.copy_rows<Shape::kPanels, Shape::kKeys>(target, head_rows<const Element>(tensor, batch, kv_head), tensor.row_stride,
                                                   tiles.begin * Shape::kKeys, tiles.end * Shape::kKeys, visible_end,
                                                   static_cast<int>(columns));
    };
    copy_tiles(place + layout.keys(), problem.k, problem.head_size);
    barrier_arrive_after_copies(shared_address(&work[i].keys_full));
    copy_tiles(place + layout.values(), problem.v, problem.v_head_size);
    barrier_arrive_after_copies(shared_address(&work[i].values_full));
    if (threadIdx.x == 0) {
      work[i].batch = batch;
      work[i].q_head = q_head;
      work[i].begin = limits.begin;
      work[i].end = limits.end;
      work[i].key_end = limits.key_end;
      work[i].has_addend = params.must_scale;
    }
  }
  __syncthreads();
  if constexpr (kHasKeyRow) {
#pragma unroll 1
    for (int i = 0; i < heads; ++i) {
      float* key_row = reinterpret_cast<float*>(shared_bytes + i * layout.bytes() + layout.key_row());
#pragma unroll 1
      for (int key = threadIdx.x; key < layout.tiles * Shape::kKeys; key += blockDim.x) {
        const float addend = key < work[i].key_end ? key_addend(problem, work[i].batch, work[i].q_head, key) : 0.0f;
        key_row[key] = addend;
        if (addend != 0.0f) work[i].has_addend = true;
      }
    }
    __syncthreads();
  }

  const int warp_row = threadIdx.x % kWarpgroupThreads / 32 * 16;
  int head = 0;
#pragma unroll 1
  for (int row_block = warpgroup;; row_block += params.plan.warpgroups) {
#pragma unroll 1
    for (; row_block >= layout.row_blocks; row_block -= layout.row_blocks) ++head;
    if (head >= heads) break;
    const KeyLimits limits(work[head].begin, work[head].end, work[head].key_end);
    const bool has_addend = kHasKeyRow && uniform(work[head].has_addend);  // a head of which every key is kept costs nothing more
    const float unit = has_addend ? kLog2e : params.raw_unit;
    const int first_row = row_block * Shape::kRows;
    const uint32_t place = shared_address(shared_bytes) + head * layout.bytes(), queries = place + row_block * layout.query_bytes();
    const TileRange tiles = limits.visited<Shape::kKeys>(first_row, min(first_row + Shape::kRows, q_len));
    const auto wait = [](uint64_t& barrier) {
      barrier_wait(shared_address(&barrier), 0);
      publish_to_bulk_copies();
    };
    wait(work[head].keys_full);
    RunningSoftmax<2> softmax;
    Output<Shape> output;
#pragma unroll 1
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      Scores<Shape> scores;
      start_scores<Element, Shape>(scores, queries, place + layout.keys() + tile * layout.tile_bytes());
      products_wait<0>();
      if (kHasKeyRow && has_addend) add_key_row<Shape>(scores, place + layout.key_row() + tile * Shape::kKeys * 4, params.scale);
      if (!tiles.is_whole(tile)) limits.template exclude_others<Shape>(scores, first_row + warp_row, tile * Shape::kKeys);
      float correction[2];
      const bool must_correct = softmax.advance(scores, unit, correction) && tile > tiles.begin;
      float reference[2];
      softmax.find_references(scores, unit, reference);
      scores.for_each([&](float& score, int row, int) { score = softmax.weight(score, row, unit, reference[row]); });
      Weights<Element, Shape> weights;
      weights.pack(scores);
      if (must_correct) output.for_each([&](float& value, int row, int) { value *= correction[row]; });
      if (tile == tiles.begin) wait(work[head].values_full);
      start_output<Element, Shape>(output, weights, place + layout.values() + tile * layout.tile_bytes(), tile > tiles.begin);
      products_wait<0>();
    }

    softmax.finish();
    const int rows = q_len - first_row, batch = work[head].batch, q_head = work[head].q_head;  // rows that are left
    store_log_sum_exp(problem, softmax, unit, batch, q_head, first_row + warp_row);
    const float inverse[2] = {softmax.inverse_sum(0), softmax.inverse_sum(1)};
    stage_output<Element, Shape>(output, inverse, queries);
    __syncwarp();
    store_rows<Element, Shape>(shared_bytes + head * layout.bytes() + row_block * layout.query_bytes(),
                               head_rows<Element>(problem.y, batch, q_head) + first_row * problem.y.row_stride, problem.y.row_stride, rows,
                               static_cast<int>(problem.v_head_size));
  }
  copy_async_commit();
  copy_async_wait<0>();  // no thread leaves before its copies, which others may be waiting for
}

}  // namespace onnx_attn::forward_short_kernel
