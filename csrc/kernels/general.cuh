// general.cuh: the steps that the general kernels share: what a block works on, and the scores of one tile of query rows and keys.
//
// A block of 128 threads owns a tile of query rows and walks over tiles of 64 keys. Thread (y, x) of 8 x 16 holds the
// scores of rows y, y + 8, ... and keys x, x + 16, ... in registers, so that the 16 threads of a row are half a warp.
// Everything is a run-time fact read once for each tile, except the accumulation type and the height of the tile.
#pragma once

#include <cuda_runtime.h>

#include <cfloat>

#include "../device/load_tile.cuh"
#include "../key_range.h"
#include "../problem.h"

namespace onnx_attn::general {

using device::Packet;

// What one block computes: a tile of rows of one head, and some of its value columns. It lives in shared memory, where one
// thread puts it: a dozen 64-bit numbers would cost every thread the registers that the tile needs.
struct Work {
  int64_t batch, head, kv_head;
  int64_t row_begin;
  int64_t value_begin;
  int64_t length;         // valid keys
  int64_t offset;         // query row i stands at key position i + offset
  int64_t visible_begin, visible_end;  // keys that some row of the tile can see
  int64_t indirect_rows;  // rows of K and V below this come from another beam's cache
};

template <class AccumType, int kThreadRowCount>
struct Shape {
  using Accum = AccumType;
  static constexpr int kThreads = 128;
  static constexpr int kBlocksPerSm = 3;  // leaves 168 registers; fewer blocks would not hide the loads, more would spill
  static constexpr int kThreadsAcross = 16;                       // x: threads that share a row
  static constexpr int kThreadsDown = kThreads / kThreadsAcross;  // y
  static constexpr int kRowsPerThread = kThreadRowCount;
  static constexpr int kRows = kRowsPerThread * kThreadsDown;
  static constexpr int kKeys = 64;
  static constexpr int kKeysPerThread = kKeys / kThreadsAcross;
  static constexpr int kVector = Packet<Accum>::kCount;  // elements of one shared-memory access
  static constexpr int kDepth = 32;                      // columns of Q and K in shared memory at a time
  static constexpr int kValueKeys = 32;                  // rows of V in shared memory at a time
  static constexpr int kValueGroups = 2;
  static constexpr int kValueGroup = kThreadsAcross * kVector;   // columns that the threads of a row cover with one access each
  static constexpr int kValues = kValueGroups * kValueGroup;     // value columns of a block: 128 in float32, 64 in float64

  using Scores = Accum[kRowsPerThread][kKeysPerThread];
  using Outputs = Accum[kRowsPerThread][kValueGroups][kVector];

  // Rows are padded so that threads in different rows hit different banks. V takes the place of Q and K, which are spent by then.
  struct Operands {
    Accum queries[kRows][kDepth + kVector];
    Accum keys[kKeys][kDepth + kVector];
  };
  struct Shared {
    union {
      Operands operands;
      Accum values[kValueKeys][kValues];
    };
    Accum weights[kRows][kKeys + 64 / sizeof(Accum)];
    Work work;
  };
  static_assert(sizeof(Shared) <= 48 * 1024, "static shared memory ends at 48 KB");

  __device__ static int thread_row() { return threadIdx.x / kThreadsAcross; }
  __device__ static int thread_column() { return threadIdx.x % kThreadsAcross; }
};

template <class Shape>
__host__ __device__ int64_t row_blocks(const Problem& problem) {
  return (problem.q_len + Shape::kRows - 1) / Shape::kRows;
}

template <class Shape>
__host__ __device__ int64_t value_chunks(const Problem& problem) {
  const int64_t chunks = (problem.v_head_size + Shape::kValues - 1) / Shape::kValues;
  return chunks > 0 ? chunks : 1;  // log-sum-exp may be wanted of values that have no columns
}

template <class Shape>
__device__ Work find_work(const Problem& problem, int64_t index, int64_t chunks) {
  Work work;
  work.value_begin = index % chunks * Shape::kValues;
  index /= chunks;
  const int64_t blocks = row_blocks<Shape>(problem);
  work.row_begin = index % blocks * Shape::kRows;
  index /= blocks;
  work.head = index % problem.q_heads;
  work.batch = index / problem.q_heads;
  work.kv_head = work.head / (problem.q_heads / problem.kv_heads);

  const int64_t tile_end = work.row_begin + Shape::kRows;
  const int64_t row_end = tile_end < problem.q_len ? tile_end : problem.q_len;
  const RowPosition position = row_position(problem.mask, work.batch, problem.q_len, problem.kv_len);
  const KeyRange visible = visible_keys(problem.mask, position, work.row_begin, row_end);
  work.length = position.length;
  work.offset = position.offset;
  work.visible_begin = visible.begin;
  work.visible_end = visible.end;
  work.indirect_rows = problem.beams.index ? problem.beams.past.at(work.batch, problem.kv_len) : 0;
  return work;
}

template <class Shape>
__device__ __forceinline__ void share_work(const Problem& problem, int64_t index, int64_t chunks, typename Shape::Shared& shared) {
  __syncthreads();  // the work before has been read
  if (threadIdx.x == 0) shared.work = find_work<Shape>(problem, index, chunks);
  __syncthreads();
}

// Where row `key` of K or V of this work lies.
__device__ __forceinline__ int64_t key_row(const Problem& problem, const Work& work, const Tensor4& tensor, int64_t key) {
  int64_t batch = work.batch;
  if (key < work.indirect_rows) {
    const int64_t width = problem.beams.width;
    const int64_t beam = problem.beams.index[batch * problem.beams.batch_stride + key];
    // Checked on the host where it can be; here an index that is out of range must not become an address.
    batch = batch / width * width + (beam < 0 ? 0 : beam >= width ? width - 1 : beam);
  }
  return batch * tensor.batch_stride + work.kv_head * tensor.head_stride + key * tensor.row_stride;
}

// Bias of a projection that is added as rows are read: row `head` of [heads, columns], from column `first`. Null: none.
__device__ __forceinline__ const void* bias_row(const void* bias, DType dtype, int64_t head, int64_t columns, int64_t first) {
  if (!bias) return nullptr;
  const int64_t size = dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2;
  return static_cast<const char*>(bias) + (head * columns + first) * size;
}

// scores = Q K^T for the keys from key_begin on; keys outside `readable` count as rows of zeros.
template <class Shape>
__device__ void multiply_queries_keys(const Problem& problem, const Work& work, int64_t key_begin, KeyRange readable,
                                      typename Shape::Shared& shared, typename Shape::Scores& scores) {
  using Accum = typename Shape::Accum;
  constexpr int kVector = Shape::kVector;
#pragma unroll
  for (int r = 0; r < Shape::kRowsPerThread; ++r) {
#pragma unroll
    for (int c = 0; c < Shape::kKeysPerThread; ++c) scores[r][c] = 0;
  }

#pragma unroll 1
  for (int64_t first = 0; first < problem.head_size; first += Shape::kDepth) {
    const int64_t columns = problem.head_size - first;
    const auto query_offset = [&](int row) -> int64_t {
      const int64_t query = work.row_begin + row;
      if (query >= problem.q_len) return device::kNoRow;
      return work.batch * problem.q.batch_stride + work.head * problem.q.head_stride + query * problem.q.row_stride + first;
    };
    const auto key_offset = [&](int row) -> int64_t {
      const int64_t key = key_begin + row;
      if (key < readable.begin || key >= readable.end) return device::kNoRow;
      return key_row(problem, work, problem.k, key) + first;
    };
    auto& queries = shared.operands.queries;
    auto& keys = shared.operands.keys;
    __syncthreads();  // what this memory held before has been read
    device::load_tile<Shape::kThreads, Shape::kRows, Shape::kDepth>(queries, problem.q.data, problem.dtype, columns, query_offset);
    device::load_tile<Shape::kThreads, Shape::kKeys, Shape::kDepth>(keys, problem.k.data, problem.dtype, columns, key_offset);
    const void* q_bias = bias_row(problem.q_bias, problem.dtype, work.head, problem.head_size, first);
    const void* k_bias = bias_row(problem.append.active ? nullptr : problem.k_bias, problem.dtype, work.kv_head, problem.head_size, first);
    if (q_bias || k_bias) {
      __syncthreads();
      if (q_bias) device::add_row_bias<Shape::kThreads, Shape::kRows, Shape::kDepth>(queries, q_bias, problem.dtype, columns, query_offset);
      if (k_bias) device::add_row_bias<Shape::kThreads, Shape::kKeys, Shape::kDepth>(keys, k_bias, problem.dtype, columns, key_offset);
    }
    __syncthreads();

#pragma unroll 1
    for (int d = 0; d < Shape::kDepth; d += kVector) {
      Packet<Accum> key[Shape::kKeysPerThread];
#pragma unroll
      for (int c = 0; c < Shape::kKeysPerThread; ++c) {
        key[c] = *reinterpret_cast<const Packet<Accum>*>(&keys[Shape::thread_column() + c * Shape::kThreadsAcross][d]);
      }
#pragma unroll
      for (int r = 0; r < Shape::kRowsPerThread; ++r) {
        const auto query = *reinterpret_cast<const Packet<Accum>*>(&queries[Shape::thread_row() + r * Shape::kThreadsDown][d]);
#pragma unroll
        for (int v = 0; v < kVector; ++v) {
#pragma unroll
          for (int c = 0; c < Shape::kKeysPerThread; ++c) scores[r][c] += query.elements[v] * key[c].elements[v];
        }
      }
    }
  }
}

// Calls body(cell, r, row, column) for each score of this thread, at [row][column] of the tile.
template <class Shape, class Body>
__device__ __forceinline__ void for_each_score(typename Shape::Scores& scores, Body&& body) {
#pragma unroll
  for (int r = 0; r < Shape::kRowsPerThread; ++r) {
#pragma unroll
    for (int c = 0; c < Shape::kKeysPerThread; ++c) {
      body(scores[r][c], r, Shape::thread_row() + r * Shape::kThreadsDown, Shape::thread_column() + c * Shape::kThreadsAcross);
    }
  }
}

// A distance from the first key of a tile, as a column of the tile or one of its two ends.
template <class Shape>
__device__ __forceinline__ int tile_column(int64_t distance) {
  return distance < 0 ? 0 : distance > Shape::kKeys ? Shape::kKeys : static_cast<int>(distance);
}

// A finite float64 bias stays finite in float32: the lowest double means "hardly ever", not "never".
template <class Accum, class Element>
__device__ __forceinline__ Accum convert_bias(Element value) {
  if constexpr (sizeof(Element) > sizeof(Accum)) {
    constexpr Element kLimit = FLT_MAX;
    if (isfinite(value)) return static_cast<Accum>(fmin(fmax(value, -kLimit), kLimit));
  }
  return device::convert<Accum>(value);
}

// What the tensor mask and the padding say of this thread's keys in one row. Bit c stands for column x + 16 c.
template <class Shape>
struct RowMask {
  typename Shape::Accum bias[Shape::kKeysPerThread] = {};
  unsigned allowed = ~0u;
  unsigned kept = ~0u;

  // Columns at or past `end` are not read: the tensors may end there.
  __device__ void read_tensor(const TensorMask& tensor, const Work& work, int64_t query, int64_t key_begin, int end) {
    const int64_t base = work.batch * tensor.batch_stride + work.head * tensor.head_stride + query * tensor.query_stride;
    if (tensor.kind == TensorMask::Kind::keep) {
      const auto* keep = static_cast<const uint8_t*>(tensor.data) + base;
#pragma unroll
      for (int c = 0; c < Shape::kKeysPerThread; ++c) {
        const int column = Shape::thread_column() + c * Shape::kThreadsAcross;
        if (column < end && !keep[(key_begin + column) * tensor.key_stride]) allowed &= ~(1u << c);
      }
    } else {
      device::with_float_type(tensor.dtype, [&](auto type) {
        const auto* data = static_cast<const decltype(type)*>(tensor.data) + base;
#pragma unroll
        for (int c = 0; c < Shape::kKeysPerThread; ++c) {
          const int column = Shape::thread_column() + c * Shape::kThreadsAcross;
          if (column < end) bias[c] = convert_bias<typename Shape::Accum>(data[(key_begin + column) * tensor.key_stride]);
        }
      });
    }
  }

  __device__ void read_padding(const Padding& padding, const Work& work, int64_t query, int64_t key_begin, int end) {
    device::with_integer_type(padding.dtype, [&](auto type) {
      const auto* data = static_cast<const decltype(type)*>(padding.data) + work.batch * padding.batch_stride;
      const bool is_lengths = padding.kind == Padding::Kind::lengths;
      const int64_t columns = is_lengths ? static_cast<int64_t>(data[0]) : padding.columns;
#pragma unroll
      for (int c = 0; c < Shape::kKeysPerThread; ++c) {
        const int column = Shape::thread_column() + c * Shape::kThreadsAcross;
        const int64_t key = key_begin + column;
        bool keep = column < end && key < columns;
        if (keep && !is_lengths) keep = data[query * padding.query_stride + key * padding.key_stride] > 0;
        if (!keep) kept &= ~(1u << c);
      }
    });
  }
};

// Bias, padding and exclusion for this thread's scores of one row. Excluded keys are selected away, never multiplied or
// added to: a key past the length may hold NaN.
template <class Shape>
__device__ void mask_row(const Problem& problem, const Work& work, int64_t query, int64_t key_begin,
                         typename Shape::Accum (&scores)[Shape::kKeysPerThread]) {
  using Accum = typename Shape::Accum;
  const Mask& mask = problem.mask;
  // Both ends of what this row can see, as columns of the tile.
  const int64_t distance = query + work.offset - key_begin;  // the row's own position
  const int begin = mask.left < 0 ? 0 : tile_column<Shape>(distance - mask.left);
  const int causal_end = mask.right < 0 ? Shape::kKeys : tile_column<Shape>(distance + mask.right + 1);
  int end = tile_column<Shape>(work.length - key_begin);

  RowMask<Shape> row_mask;
  if (mask.tensor.kind != TensorMask::Kind::none) {
    const int tensor_end = tile_column<Shape>(mask.tensor.columns - key_begin);
    if (tensor_end < end) end = tensor_end;
    row_mask.read_tensor(mask.tensor, work, query, key_begin, end);
  }
  if (mask.padding.kind != Padding::Kind::none) row_mask.read_padding(mask.padding, work, query, key_begin, end);

#pragma unroll
  for (int c = 0; c < Shape::kKeysPerThread; ++c) {
    const int column = Shape::thread_column() + c * Shape::kThreadsAcross;
    Accum score = scores[c] + row_mask.bias[c];
    if (column >= causal_end) {
      // com.microsoft fills these with float32 lowest in place of the padding filter, and its qk output shows that. Attention
      // itself excludes them, so that tiles beyond the causal frontier need not be visited.
      score = problem.score_mode == ScoreMode::mha_logits ? score + static_cast<Accum>(-FLT_MAX) : -INFINITY;
    } else if (!(row_mask.kept >> c & 1)) {
      score += static_cast<Accum>(mask.padding.filter);
    }
    const bool is_allowed = column >= begin && column < end && (row_mask.allowed >> c & 1);
    scores[c] = is_allowed ? score : -INFINITY;
  }
}

// How far scores are taken, in the order of the operator.
enum class Stage { scaled, capped, masked };

// From the bare product to the scores that softmax sees, or to an earlier stage. Row by row in a loop that is not unrolled,
// which wants the scores in memory: unrolled, every feature would be there once for each row, and the registers would not do.
template <class Shape>
__device__ void finish_scores(const Problem& problem, const Work& work, int64_t key_begin, Stage stage, typename Shape::Shared& shared,
                              typename Shape::Scores& scores) {
  using Accum = typename Shape::Accum;
  // Each thread meets only its own cells, so there is nothing to synchronise.
  for_each_score<Shape>(scores, [&](Accum& score, int, int row, int column) { shared.weights[row][column] = score; });
  const Accum scale = static_cast<Accum>(problem.scale), cap = static_cast<Accum>(problem.softcap);

#pragma unroll 1
  for (int row = Shape::thread_row(); row < Shape::kRows; row += Shape::kThreadsDown) {
    Accum row_scores[Shape::kKeysPerThread];
    Accum* cells = &shared.weights[row][Shape::thread_column()];
#pragma unroll
    for (int c = 0; c < Shape::kKeysPerThread; ++c) row_scores[c] = cells[c * Shape::kThreadsAcross] * scale;
    if (stage != Stage::scaled && cap != 0) {
#pragma unroll
      for (int c = 0; c < Shape::kKeysPerThread; ++c) row_scores[c] = cap * tanh(row_scores[c] / cap);
    }
    const int64_t query = work.row_begin + row;
    if (stage == Stage::masked && query < problem.q_len) mask_row<Shape>(problem, work, query, key_begin, row_scores);
#pragma unroll
    for (int c = 0; c < Shape::kKeysPerThread; ++c) cells[c * Shape::kThreadsAcross] = row_scores[c];
  }
  for_each_score<Shape>(scores, [&](Accum& score, int, int row, int column) { score = shared.weights[row][column]; });
}

// The running maximum and sum of each row of this thread. `sum` is this thread's share until finish().
template <class Shape>
struct Softmax {
  using Accum = typename Shape::Accum;
  Accum max[Shape::kRowsPerThread];
  Accum sum[Shape::kRowsPerThread];

  __device__ Softmax() {
#pragma unroll
    for (int r = 0; r < Shape::kRowsPerThread; ++r) {
      max[r] = -INFINITY;
      sum[r] = 0;
    }
  }

  // -inf - -inf is NaN; a row without a finite score takes its exponentials from 0 instead and gets zeros.
  // A NaN score passes fmax by and stays NaN in the exponential.
  __device__ Accum reference(int r) const { return max[r] == -INFINITY ? Accum(0) : max[r]; }

  // Scores become weights, unnormalised; earlier results are to be multiplied by `correction`.
  __device__ void update(typename Shape::Scores& scores, Accum (&correction)[Shape::kRowsPerThread]) {
#pragma unroll
    for (int r = 0; r < Shape::kRowsPerThread; ++r) {
      Accum tile_max = scores[r][0];
#pragma unroll
      for (int c = 1; c < Shape::kKeysPerThread; ++c) tile_max = fmax(tile_max, scores[r][c]);
#pragma unroll
      for (int lanes = Shape::kThreadsAcross / 2; lanes > 0; lanes /= 2) {
        tile_max = fmax(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, lanes));
      }
      const Accum old_max = max[r];
      max[r] = fmax(old_max, tile_max);
      correction[r] = exp(old_max - reference(r));
      sum[r] *= correction[r];
#pragma unroll
      for (int c = 0; c < Shape::kKeysPerThread; ++c) {
        scores[r][c] = exp(scores[r][c] - reference(r));
        sum[r] += scores[r][c];
      }
    }
  }

  __device__ void finish() {
#pragma unroll
    for (int r = 0; r < Shape::kRowsPerThread; ++r) {
#pragma unroll
      for (int lanes = Shape::kThreadsAcross / 2; lanes > 0; lanes /= 2) sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], lanes);
    }
  }
};

}  // namespace onnx_attn::general
