// decode.cuh: attention of a few query rows over many keys, which is a matter of reading the keys and values at full speed.
//
// Work comes in units: a chunk of keys of one (batch entry, kv head), for all query rows that share it. A block keeps to its
// SM and walks over every gridDim.x-th unit. One warp, the loader, runs ahead over the tiles of all these units and fills a
// ring of stages in shared memory, of which only one is being read at a time: the others, 160 KB, are on their way. The other
// warps divide a tile: each takes 16 query rows and 16 keys at a time, and has a running softmax of its own. Nothing but the
// ring synchronises them, until they add up their results at the end of the unit.
#pragma once

#include "../device/decode_mask.cuh"
#include "../device/decode_result.cuh"
#include "../device/decode_tile.cuh"

namespace onnx_attn::decode {

inline constexpr int kMaxWarps = 8;  // that compute; the loader is one more

struct Job {
  Problem problem;
  Partition cut;
  int stages = 0;
  Partials partials;
};

struct Control {
  RingBarriers ring;
  float2 stats[kMaxWarps][kTileRows];  // max and sum of each warp's rows
  UnitTable units;
};
static_assert(sizeof(Control) <= kControlBytes);

template <int kHeadSize>
struct SharedMemory {
  uint32_t ring;     // stages
  uint32_t queries;  // row_tiles * 16 rows, swizzled
  float* ring_floats;
  Control* control;

  __device__ __forceinline__ explicit SharedMemory(const Job& job) {
    extern __shared__ uint8_t bytes[];
    constexpr uint32_t kAlignment = 1024;  // the swizzle counts rows from there
    uint8_t* start = bytes + ((kAlignment - shared_address(bytes) % kAlignment) % kAlignment);
    ring_floats = reinterpret_cast<float*>(start);
    ring = shared_address(start);
    const int ring_bytes = job.stages * Stage<kHeadSize>::kBytes;
    queries = ring + ring_bytes;
    control = reinterpret_cast<Control*>(start + ring_bytes + job.cut.row_tiles * kTileRows * kHeadSize * 2);
  }
  __device__ __forceinline__ uint32_t stage(int index) const { return ring + index * Stage<kHeadSize>::kBytes; }
  __device__ __forceinline__ uint32_t full(int stage) const { return shared_address(&control->ring.full[stage]); }
  __device__ __forceinline__ uint32_t empty(int stage) const { return shared_address(&control->ring.empty[stage]); }
};

// Tiles start at multiples of their size, so that a row's bits do not depend on where its unit begins.
template <int kHeadSize>
__device__ __forceinline__ int first_tile(const Unit& unit) { return unit.begin / Stage<kHeadSize>::kKeys * Stage<kHeadSize>::kKeys; }

template <class Element, int kHeadSize, bool kInBulk>
__device__ __forceinline__ void load_units(const Job& job, const TensorMaps& maps, const SharedMemory<kHeadSize>& shared) {
  RingPlace place;
  Unit unit;
  UnitWalk units(job.problem, job.cut, shared.control->units);
  while (units.next(unit)) {
    for (int key = first_tile<kHeadSize>(unit); key < unit.end; key += Stage<kHeadSize>::kKeys) {
      device::barrier_wait(shared.empty(place.stage), place.parity ^ 1);
      const uint32_t stage = shared.stage(place.stage), full = shared.full(place.stage);
      if constexpr (kInBulk) load_stage_in_bulk<kHeadSize>(maps, unit, key, stage, full);
      else load_stage_by_copies<Element, kHeadSize>(job.problem, unit, key, stage, full);
      __syncwarp();
      place.advance(job.stages);
    }
  }
}

// The query rows of a unit, with their bias, as rows of shared memory. Rows and columns that do not exist are zeros.
template <class Element, int kHeadSize>
__device__ __forceinline__ void stage_queries(const Job& job, const Unit& unit, int first_row, int threads, uint32_t target) {
  constexpr int kPieces = kHeadSize / 8;
  const Problem& problem = job.problem;
  const int q_len = static_cast<int>(problem.q_len), group = static_cast<int>(problem.q_heads / problem.kv_heads);
  const int rows = job.cut.row_tiles * kTileRows;
  for (int index = threadIdx.x; index < rows * kPieces; index += threads) {
    const int row = index / kPieces, piece = index % kPieces;
    uint4 elements = make_uint4(0, 0, 0, 0);
    if (first_row + row < job.cut.rows && piece * 8 < problem.head_size) {
      const int head_in_group = (first_row + row) / q_len, query = (first_row + row) - head_in_group * q_len;
      const int64_t head = int64_t{unit.kv_head} * group + head_in_group;
      const Element* source = static_cast<const Element*>(problem.q.data) + unit.batch * problem.q.batch_stride +
                              head * problem.q.head_stride + query * problem.q.row_stride + piece * 8;
      elements = *reinterpret_cast<const uint4*>(source);
      if (problem.q_bias) {
        const Element* bias = static_cast<const Element*>(problem.q_bias) + head * problem.head_size + piece * 8;
        add_elements<Element>(elements, bias);
      }
    }
    device::store_shared_16(target + swizzled(row, piece, rows * 128), elements);
  }
}

// A warp's 16 query rows, their running softmax, and their output so far.
template <class Element, int kHeadSize>
struct RowTile {
  static constexpr bool kHoldsQueries = kHeadSize <= 128;  // in registers; wider ones come from shared memory each time
  static constexpr int kSteps = kHeadSize / 16;            // of 16 columns
  using S = Stage<kHeadSize>;

  uint32_t queries[kHoldsQueries ? kSteps : 1][4];
  uint32_t query_address;      // of this lane, for ldmatrix
  int query_panel_bytes;
  float output[kHeadSize / 8][4];
  float row_max[2], row_sum[2];  // base 2; the sum is of this lane's keys only

  // ldmatrix takes an address from each lane. Queries and values: lanes 0-15 name 16 rows, lanes 16-31 the next piece of
  // them. Keys, whose rows are the columns of the product: lanes 8-15 name the next piece of the first 8 rows.
  static __device__ __forceinline__ int value_row() { return lane_index() % 16; }
  static __device__ __forceinline__ int value_piece() { return lane_index() / 16; }
  static __device__ __forceinline__ int key_row() { return lane_index() % 8 + lane_index() / 16 * 8; }
  static __device__ __forceinline__ int key_piece() { return lane_index() / 8 % 2; }
  // Piece 2 * step + piece of a swizzled row whose address is `row`; rows of 16-row blocks have lane % 8 = row % 8.
  static __device__ __forceinline__ uint32_t piece_address(uint32_t row, int step, int piece, int panel_bytes) {
    return row + step / 4 * panel_bytes + (((2 * (step % 4)) ^ piece ^ (lane_index() % 8)) << 4);
  }

  __device__ __forceinline__ void start(uint32_t staged, int row_tile, int row_tiles) {
    query_panel_bytes = row_tiles * kTileRows * 128;
    query_address = staged + (row_tile * kTileRows + value_row()) * 128;
    if constexpr (kHoldsQueries) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) load_queries(queries[step], step);
    }
#pragma unroll
    for (int i = 0; i < kHeadSize / 8; ++i) output[i][0] = output[i][1] = output[i][2] = output[i][3] = 0.0f;
    row_max[0] = row_max[1] = -INFINITY;
    row_sum[0] = row_sum[1] = 0.0f;
  }

  __device__ __forceinline__ void load_queries(uint32_t (&fragment)[4], int step) const {
    device::load_matrices(fragment, piece_address(query_address, step, value_piece(), query_panel_bytes));
  }

  // Products with the 16 keys at `keys`. Even and odd steps are summed apart: half as long a chain of dependent products.
  __device__ __forceinline__ void multiply_keys(Scores& scores, uint32_t keys) {
    const uint32_t row = keys + key_row() * 128;
    Scores sums[2] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t fragment[4];
      device::load_matrices(fragment, piece_address(row, step, key_piece(), S::kPanelBytes));
      uint32_t(&query)[4] = queries[kHoldsQueries ? step : 0];
      if constexpr (!kHoldsQueries) load_queries(query, step);
      device::multiply_accumulate<Element>(sums[step % 2][0], query, fragment[0], fragment[1]);
      device::multiply_accumulate<Element>(sums[step % 2][1], query, fragment[2], fragment[3]);
    }
    for_each_score([&](int half, int e, int, int) { scores[half][e] = sums[0][half][e] + sums[1][half][e]; });
  }

  // Takes the scores into the softmax and returns their weights as the left operand of the next product.
  __device__ __forceinline__ void update(Scores& scores, uint32_t (&weights)[4]) {
    float new_max[2] = {row_max[0], row_max[1]};
    for_each_score([&](int half, int e, int row, int) { new_max[row] = fmaxf(new_max[row], scores[half][e]); });
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      new_max[r] = fmaxf(new_max[r], __shfl_xor_sync(~0u, new_max[r], 1));
      new_max[r] = fmaxf(new_max[r], __shfl_xor_sync(~0u, new_max[r], 2));
    }
    // Rare after the first tiles, and exact to skip: the other rows' factor is 1.
    if (__any_sync(~0u, new_max[0] > row_max[0] || new_max[1] > row_max[1])) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float factor = new_max[r] > row_max[r] ? device::exp2_fast(row_max[r] - new_max[r]) : 1.0f;
        row_max[r] = new_max[r];
        row_sum[r] *= factor;
#pragma unroll
        for (int i = 0; i < kHeadSize / 8; ++i) {
          output[i][2 * r] *= factor;
          output[i][2 * r + 1] *= factor;
        }
      }
    }
    const float reference[2] = {row_max[0] == -INFINITY ? 0.0f : row_max[0], row_max[1] == -INFINITY ? 0.0f : row_max[1]};
    for_each_score([&](int half, int e, int row, int) {
      scores[half][e] = device::exp2_fast(scores[half][e] - reference[row]);
      row_sum[row] += scores[half][e];
    });
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      weights[2 * half] = device::pack<Element>(scores[half][0], scores[half][1]);
      weights[2 * half + 1] = device::pack<Element>(scores[half][2], scores[half][3]);
    }
  }

  // Adds the 16 values at `values`, of which the first `count` exist. The others may be NaN, which a weight of 0 does not
  // undo: their bits are cleared.
  __device__ __forceinline__ void add_values(const uint32_t (&weights)[4], uint32_t values, int count) {
    const uint32_t row = values + value_row() * 128;
    uint32_t keep[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = lane_key() + 8 * half;
      keep[half] = (key < count ? 0x0000ffffu : 0u) | (key + 1 < count ? 0xffff0000u : 0u);
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t fragment[4];
      device::load_matrices_transposed(fragment, piece_address(row, step, value_piece(), S::kPanelBytes));
      device::multiply_accumulate<Element>(output[2 * step], weights, fragment[0] & keep[0], fragment[1] & keep[1]);
      device::multiply_accumulate<Element>(output[2 * step + 1], weights, fragment[2] & keep[0], fragment[3] & keep[1]);
    }
  }
};

}  // namespace onnx_attn::decode
