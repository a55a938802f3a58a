// forward_sm90_mask.cuh: what the Hopper forward kernel does to scores before limits and softmax: scale, softcap, and masks, biases and
// key padding, which are read from global memory straight into the lanes that hold the scores.
#pragma once

#include "../device/masking.cuh"
#include "forward_sm90_scores.cuh"

namespace onnx_attn::forward_sm90_kernel {

// Of calls without masks.
template <class Element, class Shape, ScoreWork kScoreWork>
struct MaskReader {
  const ScoreTransform& transform;

  __device__ __forceinline__ MaskReader(const ForwardParams& params, const Work&, int) : transform(params.transform) {}
  __device__ __forceinline__ void read_first(int) {}
  template <class AtEdge>
  __device__ __forceinline__ void apply(Scores<Shape>& scores, const KeyLimits& limits, int first_key, bool, AtEdge) {
    if constexpr (kScoreWork == ScoreWork::cap) cap_scores<Shape, AtEdge::value>(scores, transform, limits, first_key);
  }
};

template <class Element, class Shape>
struct MaskReader<Element, Shape, ScoreWork::masks> {
  const ForwardParams& params;
  const uint8_t* rows[2];  // the mask's rows of this lane
  int batch;
  uint32_t pairs[2][Shape::kKeys / 8];  // two mask elements each, of the tile that comes next

  __device__ __forceinline__ MaskReader(const ForwardParams& params, const Work& work, int warp_row) : params(params), batch(work.batch) {
    const TensorMask& mask = params.problem.mask.tensor;
    const int bytes = mask.dtype == DType::boolean ? 1 : mask.dtype == DType::f32 ? 4 : 2;
    const uint8_t* head =
        static_cast<const uint8_t*>(mask.data) + (work.batch * mask.batch_stride + work.q_head * mask.head_stride) * bytes;
#pragma unroll
    for (int row = 0; row < 2; ++row) {  // rows past the last query read its mask, and nobody reads them
      rows[row] = head + min(int64_t{warp_row + fragment_row(row)}, params.problem.q_len - 1) * mask.query_stride * bytes;
    }
  }

  // Of the last tile, which may reach past the columns of the mask. What is not read belongs to excluded scores.
  __device__ __forceinline__ void read_first(int first_key) {
    if (params.mask_access == MaskAccess::pairs) read_pairs(first_key, std::true_type());
  }

  // Tiles follow each other down to the first: where there is a next one, its mask is read ahead, so that it is there when the
  // scores are.
  template <class AtEdge>
  __device__ __forceinline__ void apply(Scores<Shape>& scores, const KeyLimits& limits, int first_key, bool has_next, AtEdge at_edge) {
    const ScoreTransform& transform = params.transform;
    if (transform.form == ScoreForm::capped)
      cap_scores<Shape, AtEdge::value>(scores, transform, limits, first_key);
    else
      scores.for_each([&](float& score, int, int) { score *= transform.scale; });
    if (params.mask_access == MaskAccess::pairs) {
      apply_pairs(scores);
      if (has_next) read_pairs(first_key - Shape::kKeys, std::false_type());
    }
    if (params.mask_access == MaskAccess::elements) apply_elements(scores, first_key, at_edge);
    if (params.problem.mask.padding.kind != Padding::Kind::none) add_padding(scores, first_key);
  }

 private:
  // Keys from the lane's first one on that the mask speaks of. At an edge the others are not read; their scores are excluded.
  __device__ __forceinline__ int columns_from(int first) const {
    return static_cast<int>(min(params.problem.mask.tensor.columns, int64_t{1} << 30)) - first;
  }

  template <class AtEdge>
  __device__ __forceinline__ void read_pairs(int first_key, AtEdge) {
    const int first = first_key + fragment_column(), columns = columns_from(first);
    const auto read = [&](auto pair_type) {
      using Pair = decltype(pair_type);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const Pair* start = reinterpret_cast<const Pair*>(rows[row]) + first / 2;
#pragma unroll
        for (int j = 0; j < Shape::kKeys / 8; ++j) pairs[row][j] = !AtEdge::value || 8 * j < columns ? __ldg(start + 4 * j) : Pair(0);
      }
    };
    if (params.problem.mask.tensor.kind == TensorMask::Kind::keep)
      read(uint16_t());
    else
      read(uint32_t());
  }

  __device__ __forceinline__ void apply_pairs(Scores<Shape>& scores) const {
    constexpr bool kMayOverflow = std::is_same_v<Element, __nv_bfloat16>;
    const bool is_keep = params.problem.mask.tensor.kind == TensorMask::Kind::keep;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
      for (int j = 0; j < Shape::kKeys / 8; ++j) {
        float* score = &scores.value[0][j][2 * row];
        const uint32_t pair = pairs[row][j];
        if (is_keep) {
          if (!(pair & 0xffu)) score[0] = -INFINITY;
          if (!(pair & 0xff00u)) score[1] = -INFINITY;
        } else {
          const float2 bias = unpack<Element>(pair);
          score[0] = add_bias<kMayOverflow>(score[0], bias.x, kLog2e);
          score[1] = add_bias<kMayOverflow>(score[1], bias.y, kLog2e);
        }
      }
    }
  }

  template <class AtEdge>
  __device__ __forceinline__ void apply_elements(Scores<Shape>& scores, int first_key, AtEdge) const {
    const TensorMask& mask = params.problem.mask.tensor;
    const int first = first_key + fragment_column(), columns = columns_from(first);
    const auto visit = [&](auto type, auto&& body) {
      using Type = decltype(type);
      scores.for_each([&](float& score, int row, int column) {
        if (!AtEdge::value || column < columns) body(score, __ldg(reinterpret_cast<const Type*>(rows[row]) + first + column));
      });
    };
    if (mask.kind == TensorMask::Kind::keep)
      visit(uint8_t(), [](float& score, uint8_t keep) { score = keep ? score : -INFINITY; });
    else if (mask.dtype == DType::f32)
      visit(float(), [](float& score, float bias) { score = add_bias<true>(score, bias, kLog2e); });
    else
      visit(Element(), [](float& score, Element bias) { score = add_bias<true>(score, convert<float>(bias), kLog2e); });
  }

  // com.microsoft: the same for all rows of a batch entry.
  __device__ __forceinline__ void add_padding(Scores<Shape>& scores, int first_key) const {
    const Padding& padding = params.problem.mask.padding;
    const float filter = max(padding.filter * kLog2e, bias_floor(padding.filter));
    const int first = first_key + fragment_column();
    const auto add = [&](int j, int e, bool is_kept) {
      const float addend = is_kept ? 0.0f : filter;
      scores.value[0][j][e] += addend;
      scores.value[0][j][2 + e] += addend;
    };
    const auto visit = [&](int64_t length, auto&& is_kept) {
      const int kept = static_cast<int>(max(int64_t{-1} << 30, min(length - first, int64_t{1} << 30)));
#pragma unroll
      for (int j = 0; j < Shape::kKeys / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) add(j, e, 8 * j + e < kept && is_kept(8 * j + e));
      }
    };
    const auto visit_keep = [&](auto type) {
      const auto* data = static_cast<const decltype(type)*>(padding.data) + batch * padding.batch_stride + first;
      visit(padding.columns, [&](int key) { return __ldg(data + key) > 0; });
    };
    if (padding.kind == Padding::Kind::lengths) {
      const Lengths lengths{padding.data, padding.dtype, padding.batch_stride};
      visit(lengths.unclamped(batch), [](int) { return true; });
    } else if (padding.dtype == DType::i32) {
      visit_keep(int32_t());
    } else {
      visit_keep(uint8_t());
    }
  }
};

}  // namespace onnx_attn::forward_sm90_kernel
