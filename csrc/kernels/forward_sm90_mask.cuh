// forward_sm90_mask.cuh: tensor masks, biases and key padding of the Hopper forward kernel, read from global memory straight into the
// lanes that hold the scores.
#pragma once

#include "../device/masking.cuh"
#include "forward_sm90_scores.cuh"

namespace onnx_attn::forward_sm90_kernel {

inline constexpr float kLog2eFloat = 1.4426950408889634f;

// Of calls without masks.
template <class Element, class Shape, ScoreWork kScoreWork>
struct MaskReader {
  const ScoreTransform& transform;

  __device__ __forceinline__ MaskReader(const ForwardParams& params, const Work&, int) : transform(params.transform) {}
  template <class AtEdge>
  __device__ __forceinline__ void prefetch(int, AtEdge) {}
  template <class AtEdge>
  __device__ __forceinline__ void apply(Scores<Shape>& scores, int, AtEdge) const {
    if constexpr (kScoreWork == ScoreWork::cap) cap_scores<Shape>(scores, transform);
  }
};

template <class Element, class Shape>
struct MaskReader<Element, Shape, ScoreWork::masks> {
  const ForwardParams& params;
  const uint8_t* rows[2];  // the mask's rows of this lane
  int batch;
  uint32_t pairs[2][Shape::kKeys / 8];  // two mask elements each

  __device__ __forceinline__ MaskReader(const ForwardParams& params, const Work& work, int warp_row) : params(params), batch(work.batch) {
    const TensorMask& mask = params.problem.mask.tensor;
    const int bytes = mask.dtype == DType::boolean ? 1 : mask.dtype == DType::f32 ? 4 : 2;
    const uint8_t* head = static_cast<const uint8_t*>(mask.data) + (work.batch * mask.batch_stride + work.q_head * mask.head_stride) * bytes;
#pragma unroll
    for (int row = 0; row < 2; ++row) {  // rows past the last query read its mask, and nobody reads them
      rows[row] = head + min(int64_t{warp_row + fragment_row(row)}, params.problem.q_len - 1) * mask.query_stride * bytes;
    }
  }

  // Starts reading, so that the mask is there when the scores are. At an edge, columns past the mask's last read that one instead:
  // their keys are excluded anyway.
  template <class AtEdge>
  __device__ __forceinline__ void prefetch(int first_key, AtEdge) {
    if (params.mask_access != MaskAccess::pairs) return;
    const TensorMask& mask = params.problem.mask.tensor;
    const int first = first_key + fragment_column(), last = static_cast<int>(min(mask.columns, int64_t{1} << 30)) - 2;
    const auto read = [&](auto pair_type) {
      using Pair = decltype(pair_type);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const Pair* start = reinterpret_cast<const Pair*>(rows[row]) + first / 2;
#pragma unroll
        for (int j = 0; j < Shape::kKeys / 8; ++j) {
          if constexpr (AtEdge::value)
            pairs[row][j] = __ldg(reinterpret_cast<const Pair*>(rows[row]) + min(first + 8 * j, last) / 2);
          else
            pairs[row][j] = __ldg(start + 4 * j);
        }
      }
    };
    if (mask.kind == TensorMask::Kind::keep)
      read(uint16_t());
    else
      read(uint32_t());
  }

  template <class AtEdge>
  __device__ __forceinline__ void apply(Scores<Shape>& scores, int first_key, AtEdge) const {
    const ScoreTransform& transform = params.transform;
    if (transform.form == ScoreForm::capped)
      cap_scores<Shape>(scores, transform);
    else
      scores.for_each([&](float& score, int, int) { score *= transform.scale; });
    if (params.mask_access == MaskAccess::pairs) apply_pairs(scores);
    if (params.mask_access == MaskAccess::elements) apply_elements(scores, first_key);
    if (params.problem.mask.padding.kind != Padding::Kind::none) add_padding(scores, first_key);
  }

 private:
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
          score[0] = add_bias<kMayOverflow>(score[0], bias.x, kLog2eFloat);
          score[1] = add_bias<kMayOverflow>(score[1], bias.y, kLog2eFloat);
        }
      }
    }
  }

  __device__ __forceinline__ void apply_elements(Scores<Shape>& scores, int first_key) const {
    const TensorMask& mask = params.problem.mask.tensor;
    const int64_t key_stride = mask.key_stride;
    const int first = first_key + fragment_column(), last = static_cast<int>(min(mask.columns, int64_t{1} << 30)) - 1;
    const auto visit = [&](auto type, auto&& body) {
      using Type = decltype(type);
      scores.for_each([&](float& score, int row, int column) {
        body(score, __ldg(reinterpret_cast<const Type*>(rows[row]) + min(first + column, last) * key_stride));
      });
    };
    if (mask.kind == TensorMask::Kind::keep)
      visit(uint8_t(), [](float& score, uint8_t keep) { score = keep ? score : -INFINITY; });
    else if (mask.dtype == DType::f32)
      visit(float(), [](float& score, float bias) { score = add_bias<true>(score, bias, kLog2eFloat); });
    else
      visit(Element(), [](float& score, Element bias) { score = add_bias<true>(score, convert<float>(bias), kLog2eFloat); });
  }

  // com.microsoft: the same for all rows of a batch entry.
  __device__ __forceinline__ void add_padding(Scores<Shape>& scores, int first_key) const {
    const Padding& padding = params.problem.mask.padding;
    const float filter = max(padding.filter * kLog2eFloat, bias_floor(padding.filter));
    const int first = first_key + fragment_column();
    const auto add = [&](int j, int e, bool is_kept) {
      if (is_kept) return;
      scores.value[0][j][e] += filter;
      scores.value[0][j][2 + e] += filter;
    };
    with_integer_type(padding.dtype, [&](auto type) {
      const auto* data = static_cast<const decltype(type)*>(padding.data) + batch * padding.batch_stride;
      const bool by_length = padding.kind == Padding::Kind::lengths;
      const int64_t length = by_length ? static_cast<int64_t>(*data) : padding.columns;
#pragma unroll
      for (int j = 0; j < Shape::kKeys / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int key = first + 8 * j + e;
          add(j, e, key < length && (by_length || data[key * padding.key_stride] > 0));
        }
      }
    });
  }
};

}  // namespace onnx_attn::forward_sm90_kernel
