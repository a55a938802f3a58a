// general.cuh: the shape of the general kernels: what a block works on, the product of a tile of query rows and keys, and softmax.
//
// A block of 128 threads owns a tile of query rows and walks over tiles of 64 keys. Thread (y, x) of 8 x 16 holds the
// scores of rows y, y + 8, ... and keys x, x + 16, ... in registers, so that the 16 threads of a row are half a warp.
// Everything is a run-time fact read once for each tile, except the accumulation type and the height of the tile.
#pragma once

#include <cuda_runtime.h>

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
  int64_t length;                      // valid keys
  int64_t offset;                      // query row i stands at key position i + offset
  int64_t visible_begin, visible_end;  // keys that some row of the tile can see
  int64_t indirect_rows;               // rows of K and V below this come from another beam's cache
};

template <class AccumType, int kThreadRowCount>
struct Shape {
  using Accum = AccumType;
  static constexpr int kThreads = 128;
  static constexpr int kBlocksPerSm = 3;     // leaves 168 registers; fewer blocks would not hide the loads, more would spill
  static constexpr int kThreadsAcross = 16;  // x: threads that share a row
  static constexpr int kThreadsDown = kThreads / kThreadsAcross;  // y
  static constexpr int kRowsPerThread = kThreadRowCount;
  static constexpr int kRows = kRowsPerThread * kThreadsDown;
  static constexpr int kKeys = 64;
  static constexpr int kKeysPerThread = kKeys / kThreadsAcross;
  static constexpr int kVector = Packet<Accum>::kCount;  // elements of one shared-memory access
  // Columns of Q and K, and rows of V, in shared memory at a time. A short tile waits for loads, not for arithmetic: it takes
  // fewer and larger steps.
  static constexpr int kDepth = kRowsPerThread > 2 ? 32 : 64;
  static constexpr int kValueKeys = kRowsPerThread > 2 ? 32 : 64;
  static constexpr int kValueGroups = 2;
  static constexpr int kValueGroup = kThreadsAcross * kVector;  // columns that the threads of a row cover with one access each
  static constexpr int kValues = kValueGroups * kValueGroup;    // value columns of a block: 128 in float32, 64 in float64

  using Scores = Accum[kRowsPerThread][kKeysPerThread];
  using Outputs = Accum[kRowsPerThread][kValueGroups][kVector];

  // Rows are padded so that threads in different rows hit different banks. V takes the place of Q and K, which are spent by then.
  struct alignas(16) Operands {
    Accum queries[kRows][kDepth + kVector];
    Accum keys[kKeys][kDepth + kVector];
  };
  struct alignas(16) Shared {
    union {
      Operands operands;
      alignas(16) Accum values[kValueKeys][kValues];
    };
    alignas(16) Accum weights[kRows][kKeys + 64 / sizeof(Accum)];
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
  const int64_t size = float_bytes(dtype);
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
