// general_scores.cuh: from the bare product of a tile to the scores that softmax sees: scale, softcap, bias, padding, exclusion.
#pragma once

#include <cfloat>

#include "general.cuh"

namespace onnx_attn::general {

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

// How far scores are taken, in the order of the operator. `logits` is masked as com.microsoft shows it: where causality excludes
// a key it adds float32 lowest, in place of the padding filter. Attention itself excludes these cells exactly, so that tiles
// beyond the causal frontier need not be visited.
enum class Stage { scaled, capped, masked, logits };

// Bias, padding and exclusion for this thread's scores of one row. Excluded keys are selected away, never multiplied or
// added to: a key past the length may hold NaN.
template <class Shape>
__device__ void mask_row(const Problem& problem, const Work& work, int64_t query, int64_t key_begin, Stage stage,
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
      score = stage == Stage::logits ? score + static_cast<Accum>(-FLT_MAX) : -INFINITY;
    } else if (!(row_mask.kept >> c & 1)) {
      score += static_cast<Accum>(mask.padding.filter);
    }
    const bool is_allowed = column >= begin && column < end && (row_mask.allowed >> c & 1);
    scores[c] = is_allowed ? score : -INFINITY;
  }
}

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
    if (stage >= Stage::masked && query < problem.q_len) mask_row<Shape>(problem, work, query, key_begin, stage, row_scores);
#pragma unroll
    for (int c = 0; c < Shape::kKeysPerThread; ++c) cells[c * Shape::kThreadsAcross] = row_scores[c];
  }
  for_each_score<Shape>(scores, [&](Accum& score, int, int row, int column) { score = shared.weights[row][column]; });
}

}  // namespace onnx_attn::general
