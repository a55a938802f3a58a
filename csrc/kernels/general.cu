// general.cu: attention for every feature, type, size and stride. The fallback of all other kernels, and what they are tested against.
#include "general.cuh"

#include "../launch.h"
#include "general_scores.cuh"
#include "grid_size.h"

namespace onnx_attn::general {

namespace {

// outputs += weights V, for the tile of keys from key_begin on.
template <class Shape>
__device__ void multiply_weights_values(const Problem& problem, const Work& work, int64_t key_begin, typename Shape::Shared& shared,
                                        typename Shape::Outputs& outputs) {
  using Accum = typename Shape::Accum;
  constexpr int kVector = Shape::kVector;
  const int64_t columns = problem.v_head_size - work.value_begin;
#pragma unroll 1
  for (int first = 0; first < Shape::kKeys; first += Shape::kValueKeys) {
    const auto value_offset = [&](int row) -> int64_t {
      const int64_t key = key_begin + first + row;
      if (key < work.visible_begin || key >= work.visible_end) return device::kNoRow;  // a weight of 0 does not undo NaN
      return key_row(problem, work, problem.v, key) + work.value_begin;
    };
    __syncthreads();  // what this memory held before has been read, and the weights are written
    device::load_tile<Shape::kThreads, Shape::kValueKeys, Shape::kValues>(shared.values, problem.v.data, problem.v_dtype, columns,
                                                                          value_offset);
    const void* v_bias =
        bias_row(problem.append.active ? nullptr : problem.v_bias, problem.dtype, work.kv_head, problem.v_head_size, work.value_begin);
    if (v_bias) {
      __syncthreads();
      device::add_row_bias<Shape::kThreads, Shape::kValueKeys, Shape::kValues>(shared.values, v_bias, problem.dtype, columns, value_offset);
    }
    __syncthreads();

#pragma unroll 1
    for (int k = 0; k < Shape::kValueKeys; k += kVector) {
      Packet<Accum> weights[Shape::kRowsPerThread];
#pragma unroll
      for (int r = 0; r < Shape::kRowsPerThread; ++r) {
        weights[r] = *reinterpret_cast<const Packet<Accum>*>(&shared.weights[Shape::thread_row() + r * Shape::kThreadsDown][first + k]);
      }
#pragma unroll
      for (int g = 0; g < Shape::kValueGroups; ++g) {
        if (g * Shape::kValueGroup >= columns) break;
#pragma unroll
        for (int v = 0; v < kVector; ++v) {
          const auto value =
              *reinterpret_cast<const Packet<Accum>*>(&shared.values[k + v][g * Shape::kValueGroup + Shape::thread_column() * kVector]);
#pragma unroll
          for (int r = 0; r < Shape::kRowsPerThread; ++r) {
#pragma unroll
            for (int e = 0; e < kVector; ++e) outputs[r][g][e] += weights[r].elements[v] * value.elements[e];
          }
        }
      }
    }
  }
}

// Divides by the sums and writes Y and the log-sum-exp.
template <class Shape>
__device__ void write_outputs(const Problem& problem, const Work& work, const Softmax<Shape>& softmax, typename Shape::Outputs& outputs) {
  using Accum = typename Shape::Accum;
#pragma unroll
  for (int r = 0; r < Shape::kRowsPerThread; ++r) {
    // Selected, not multiplied: the accumulators of a row without a key may be NaN from V, and its result is exactly 0.
    const bool is_empty = softmax.sum[r] == 0;
    const Accum inverse = 1 / softmax.sum[r];
#pragma unroll
    for (int g = 0; g < Shape::kValueGroups; ++g) {
#pragma unroll
      for (int e = 0; e < Shape::kVector; ++e) outputs[r][g][e] = is_empty ? Accum(0) : outputs[r][g][e] * inverse;
    }
  }

  device::with_float_type(problem.dtype, [&](auto type) {
    using Element = decltype(type);
    Element* y = static_cast<Element*>(problem.y.data) + work.batch * problem.y.batch_stride + work.head * problem.y.head_stride;
#pragma unroll
    for (int r = 0; r < Shape::kRowsPerThread; ++r) {
      const int64_t query = work.row_begin + Shape::thread_row() + r * Shape::kThreadsDown;
      if (query >= problem.q_len) continue;
      Element* row = y + query * problem.y.row_stride;
#pragma unroll
      for (int g = 0; g < Shape::kValueGroups; ++g) {
#pragma unroll
        for (int e = 0; e < Shape::kVector; ++e) {
          const int64_t column = work.value_begin + g * Shape::kValueGroup + Shape::thread_column() * Shape::kVector + e;
          if (column < problem.v_head_size) row[column] = device::convert<Element>(outputs[r][g][e]);
        }
      }
    }
  });

  if (!problem.lse || work.value_begin != 0 || Shape::thread_column() != 0) return;
#pragma unroll
  for (int r = 0; r < Shape::kRowsPerThread; ++r) {
    const int64_t query = work.row_begin + Shape::thread_row() + r * Shape::kThreadsDown;
    if (query >= problem.q_len) continue;
    const Accum lse = softmax.sum[r] == 0 ? Accum(-INFINITY) : softmax.max[r] + log(softmax.sum[r]);
    problem.lse[(work.batch * problem.q_heads + work.head) * problem.q_len + query] = device::convert<float>(lse);
  }
}

// Y and the log-sum-exp. Tiles stand at fixed key positions, so that a row's bits do not depend on which tiles are skipped.
template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    attention(const __grid_constant__ Problem problem, int64_t total, int64_t chunks) {
  using Accum = typename Shape::Accum;
  __shared__ typename Shape::Shared shared;
  for (int64_t index = blockIdx.x; index < total; index += gridDim.x) {
    share_work<Shape>(problem, index, chunks, shared);
    const Work& work = shared.work;
    Softmax<Shape> softmax;
    typename Shape::Outputs outputs = {};

#pragma unroll 1
    for (int64_t key = work.visible_begin / Shape::kKeys * Shape::kKeys; key < work.visible_end; key += Shape::kKeys) {
      typename Shape::Scores scores;
      multiply_queries_keys<Shape>(problem, work, key, KeyRange{work.visible_begin, work.visible_end}, shared, scores);
      finish_scores<Shape>(problem, work, key, Stage::masked, shared, scores);

      Accum correction[Shape::kRowsPerThread];
      softmax.update(scores, correction);
#pragma unroll
      for (int r = 0; r < Shape::kRowsPerThread; ++r) {
#pragma unroll
        for (int g = 0; g < Shape::kValueGroups; ++g) {
#pragma unroll
          for (int e = 0; e < Shape::kVector; ++e) outputs[r][g][e] *= correction[r];
        }
      }
      for_each_score<Shape>(scores, [&](Accum& weight, int, int row, int column) { shared.weights[row][column] = weight; });
      multiply_weights_values<Shape>(problem, work, key, shared, outputs);
    }

    softmax.finish();
    write_outputs<Shape>(problem, work, softmax, outputs);
  }
}

template <class Shape>
__device__ void write_scores(const Problem& problem, const Work& work, int64_t key_begin, typename Shape::Scores& scores) {
  using Accum = typename Shape::Accum;
  device::with_float_type(problem.dtype, [&](auto type) {
    using Element = decltype(type);
    const int64_t head = work.batch * problem.q_heads + work.head;
    Element* target = static_cast<Element*>(problem.scores) + head * problem.q_len * problem.kv_len + key_begin;
    for_each_score<Shape>(scores, [&](Accum& score, int, int row, int column) {
      const int64_t query = work.row_begin + row;
      if (query < problem.q_len && key_begin + column < problem.kv_len) {
        target[query * problem.kv_len + column] = device::convert<Element>(score);
      }
    });
  });
}

__device__ Stage stage_of(ScoreMode mode) {
  switch (mode) {
    case ScoreMode::raw: return Stage::scaled;
    case ScoreMode::capped: return Stage::capped;
    case ScoreMode::mha_logits: return Stage::logits;
    default: return Stage::masked;
  }
}

// The score output, every cell of it.
template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    score_output(const __grid_constant__ Problem problem, int64_t total) {
  using Accum = typename Shape::Accum;
  __shared__ typename Shape::Shared shared;
  const ScoreMode mode = problem.score_mode;
  const Stage stage = stage_of(mode);

  for (int64_t index = blockIdx.x; index < total; index += gridDim.x) {
    share_work<Shape>(problem, index, 1, shared);
    const Work& work = shared.work;
    // Modes that are defined at masked cells read every key; the others must not touch what lies past the length.
    KeyRange readable{work.visible_begin, work.visible_end};
    if (stage < Stage::masked) readable = KeyRange{0, problem.kv_len};
    if (stage == Stage::logits) readable = KeyRange{0, work.length};
    Softmax<Shape> softmax;

    // Weights need the sum of the whole row, so they take a pass over the visible keys first. One loop serves both passes: the
    // steps in it are large.
#pragma unroll 1
    for (int pass = mode == ScoreMode::weights ? 0 : 1; pass < 2; ++pass) {
      const bool writes = pass == 1;
      const int64_t end = writes ? problem.kv_len : work.visible_end;
#pragma unroll 1
      for (int64_t key = writes ? 0 : work.visible_begin / Shape::kKeys * Shape::kKeys; key < end; key += Shape::kKeys) {
        typename Shape::Scores scores;
        if (key < readable.end && key + Shape::kKeys > readable.begin) {
          multiply_queries_keys<Shape>(problem, work, key, readable, shared, scores);
          finish_scores<Shape>(problem, work, key, stage, shared, scores);
        } else {
          for_each_score<Shape>(scores, [](Accum& score, int, int, int) { score = -INFINITY; });
        }
        if (!writes) {
          Accum correction[Shape::kRowsPerThread];
          softmax.update(scores, correction);
          continue;
        }
        if (mode == ScoreMode::weights) {
          for_each_score<Shape>(scores, [&](Accum& score, int r, int, int) {
            score = softmax.sum[r] == 0 ? Accum(0) : exp(score - softmax.reference(r)) / softmax.sum[r];
          });
        }
        write_scores<Shape>(problem, work, key, scores);
      }
      if (!writes) softmax.finish();
    }
  }
}

template <class Shape>
cudaError_t launch(const Problem& problem, cudaStream_t stream) {
  const int64_t tiles = problem.batch * problem.q_heads * row_blocks<Shape>(problem);
  if (tiles == 0) return cudaSuccess;
  if (problem.v_head_size > 0 || problem.lse) {
    const int64_t chunks = value_chunks<Shape>(problem);
    attention<Shape><<<grid_size(tiles * chunks), Shape::kThreads, 0, stream>>>(problem, tiles * chunks, chunks);
  }
  if (problem.score_mode != ScoreMode::none && problem.kv_len > 0) {
    score_output<Shape><<<grid_size(tiles), Shape::kThreads, 0, stream>>>(problem, tiles);
  }
  return cudaGetLastError();
}

}  // namespace

}  // namespace onnx_attn::general

namespace onnx_attn::cuda {

int general(const Problem& problem, const Plan&, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  // Few rows, as in decoding: a short tile, since rows that do not exist cost as much as those that do.
  const bool is_short = problem.q_len <= 16;
  if (problem.compute == DType::f64) return general::launch<general::Shape<double, 4>>(problem, cuda_stream);
  if (is_short) return general::launch<general::Shape<float, 2>>(problem, cuda_stream);
  return general::launch<general::Shape<float, 8>>(problem, cuda_stream);
}

}  // namespace onnx_attn::cuda
