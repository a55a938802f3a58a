// decode_mask.cuh: from the bare products of query rows and 16 keys to the scores that softmax sees, in base 2.
#pragma once

#include "base_2.cuh"
#include "decode_tile.cuh"

namespace onnx_attn::decode {

using device::kLog2e;

// A block of scores of 16 keys and 8 * kRowEights query rows: scores[n][e] is key lane / 4 + 8 * (e / 2) and row
// 8 * n + 2 * (lane % 4) + e % 2.
template <int kRowEights>
using Scores = float[kRowEights][4];

template <int kRowEights, class Body>
__device__ __forceinline__ void for_each_score(Body&& body) {  // body(n, e)
#pragma unroll
  for (int n = 0; n < kRowEights; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) body(n, e);
}

// A bias in base 2. Finite ones stay finite: a row of float minima is an ordinary softmax, a row of -inf is empty.
__host__ __device__ __forceinline__ float to_base_2(float bias) {
  constexpr float kLowest = -2.3e38f;
  return bias < kLowest && bias != -INFINITY ? kLowest * kLog2e : bias * kLog2e;
}

// What turns a product into a score, made on the host: the device then reads it where it is needed, as it does the Problem.
struct ScoreRule {
  float unit = 0;        // multiplies the product: to base 2, or with a softcap to the exponent of e^2x in base 2
  float cap = 0;         // base 2; 0 = none
  float filter = 0;      // added to keys that the padding does not keep; base 2
  bool is_plain = true;  // no softcap, no tensor mask, no padding: one question instead of five for each block of keys

  explicit ScoreRule(const Problem& problem) {
    unit = static_cast<float>(problem.softcap > 0 ? 2 * kExactLog2e * problem.scale / problem.softcap : kExactLog2e * problem.scale);
    cap = static_cast<float>(problem.softcap * kExactLog2e);
    filter = to_base_2(problem.mask.padding.filter);
    is_plain =
        !(problem.softcap > 0) && problem.mask.tensor.kind == TensorMask::Kind::none && problem.mask.padding.kind == Padding::Kind::none;
  }
};

// Where the elements of a tensor mask, or of a padding mask, begin for a row of the kv head.
__device__ __forceinline__ int64_t tensor_mask_row(const Problem& problem, const Unit& unit, int row) {
  const TensorMask& tensor = problem.mask.tensor;
  const int group = static_cast<int>(problem.q_heads / problem.kv_heads), q_len = static_cast<int>(problem.q_len);
  const int head_in_group = q_len == 1 ? row : row / q_len, query = row - head_in_group * q_len;
  return unit.batch * tensor.batch_stride + (int64_t{unit.kv_head} * group + head_in_group) * tensor.head_stride +
         query * tensor.query_stride;
}
__device__ __forceinline__ int64_t padding_mask_row(const Problem& problem, const Unit& unit, int row) {
  const Padding& padding = problem.mask.padding;
  return unit.batch * padding.batch_stride + (problem.q_len == 1 ? 0 : row % static_cast<int>(problem.q_len) * padding.query_stride);
}

// Padding keeps no key at or past this one. Its lengths are read from global memory.
__device__ __forceinline__ int padding_end(const Problem& problem, int batch) {
  const Padding& padding = problem.mask.padding;
  int64_t end = padding.columns;
  if (padding.kind == Padding::Kind::lengths) {
    device::wait_for_previous_kernel();
    const int64_t at = batch * padding.batch_stride;
    end = padding.dtype == DType::i64 ? static_cast<const int64_t*>(padding.data)[at] : static_cast<const int32_t*>(padding.data)[at];
  }
  return static_cast<int>(max(int64_t{0}, min(end, problem.kv_len)));
}

__device__ __forceinline__ const char* element_address(const void* data, int64_t index, int bytes) {
  return static_cast<const char*>(data) + index * bytes;
}

// A loader's share of what the masks say of the keys of a tile.
template <int kKeys>
__device__ __forceinline__ void copy_masks(const Problem& problem, const MaskLayout& layout, const Unit& unit, int first_row, int rows,
                                           int key, uint32_t target, const LoaderShare& share) {
  const TensorMask& tensor = problem.mask.tensor;
  const Padding& padding = problem.mask.padding;
  for (int row = share.loader; row < layout.tensor.rows && first_row + row < rows; row += share.loaders) {
    const int bytes = layout.tensor.element_bytes;
    copy_unaligned(target + row * layout.tensor.pitch,
                   element_address(tensor.data, tensor_mask_row(problem, unit, first_row + row) + key, bytes),
                   min(kKeys, unit.end - key) * bytes);
  }
  const int end = static_cast<int>(min(int64_t{unit.end}, padding.columns));
  for (int row = share.loader; row < layout.padding.rows && first_row + row < rows && key < end; row += share.loaders) {
    const int bytes = layout.padding.element_bytes;
    copy_unaligned(target + layout.padding_offset + row * layout.padding.pitch,
                   element_address(padding.data, padding_mask_row(problem, unit, first_row + row) + key, bytes),
                   min(kKeys, end - key) * bytes);
  }
}

// Keys that all rows see, as far as length, causality and windows go; in shared memory.
struct KeySpan {
  int begin, end;
};

// What the masks say of a query row of the unit at hand; in shared memory.
struct RowMask {
  int begin, count;                 // keys that the row sees, as far as length, causality and windows go
  int kept_keys;                    // padding keeps none at or past this
  int tensor_place, padding_place;  // of the row's elements in the masks of a stage
  int64_t tensor_row, padding_row;  // in global memory

  // Rows that do not exist see nothing.
  __device__ __forceinline__ void set(const Problem& problem, const MaskLayout& layout, const Unit& unit, int first_row, int row,
                                      int rows) {
    const Mask& mask = problem.mask;
    const int query = (first_row + row) % static_cast<int>(problem.q_len);
    const KeyRange visible = visible_keys(mask, row_position(mask, unit.batch, problem.q_len, problem.kv_len), query, query + 1);
    const bool sees_any = first_row + row < rows && visible.begin < visible.end;
    begin = sees_any ? static_cast<int>(visible.begin) : 0;
    count = sees_any ? static_cast<int>(visible.end - visible.begin) : 0;
    kept_keys = padding_end(problem, unit.batch);
    tensor_row = tensor_mask_row(problem, unit, first_row + row);
    padding_row = padding_mask_row(problem, unit, first_row + row);
    tensor_place = place(layout.tensor, mask.tensor.data, tensor_row, row);
    padding_place = layout.padding_offset + place(layout.padding, mask.padding.data, padding_row, row);
  }

 private:
  // Rows start in the word that they start in, and a tile is a whole number of words further on.
  static __device__ __forceinline__ int place(const StagedMask& staged, const void* data, int64_t index, int row) {
    const auto address = reinterpret_cast<uintptr_t>(element_address(data, index, staged.element_bytes));
    return max(0, min(row, staged.rows - 1)) * staged.pitch + static_cast<int>(address % 4);
  }
};

// Everything that decides whether, and by how much, a key counts for the lane's query rows. Tensors with neighbouring keys come
// with the stage, since a load of one's own would queue for microseconds behind those of the ring; others are gathered.
template <int kRowEights>
class BlockMask {
 public:
  __device__ __forceinline__ BlockMask(const Problem& problem, const ScoreRule& rule, const MaskLayout& layout)
      : problem_(problem), rule_(rule), layout_(layout) {}

  // `rows` are the rows of the warp.
  __device__ __forceinline__ void start_unit(const RowMask* rows, const KeySpan& whole) {
    rows_ = rows + 2 * (lane_index() % 4);
    whole_ = &whole;
  }

  // Turns products into scores: scale, softcap, bias and padding, and -inf where a key does not count. The last is a select,
  // never an addition: the product of a key past the length may be NaN. The block starts at key tile + key; `masks` are those
  // of the tile.
  __device__ __forceinline__ void apply(Scores<kRowEights>& scores, const uint8_t* masks, int tile, int key) const {
    for_each_score<kRowEights>([&](int n, int e) { scores[n][e] *= rule_.unit; });
    const int in_tile = key + lane_index() / 4;
    if (!rule_.is_plain) {
      if (rule_.cap > 0) apply_softcap(scores);
      if (problem_.mask.tensor.kind != TensorMask::Kind::none) apply_tensor(scores, masks, tile, in_tile);
      if (problem_.mask.padding.kind != Padding::Kind::none) apply_padding(scores, masks, tile, in_tile);
    }
    if (tile + key >= whole_->begin && tile + key + 16 <= whole_->end) return;
    for_each_score<kRowEights>([&](int n, int e) {
      if (!sees(row_of(n, e), tile + in_tile + e / 2 * 8)) scores[n][e] = -INFINITY;
    });
  }

 private:
  __device__ __forceinline__ const RowMask& row_of(int n, int e) const { return rows_[8 * n + e % 2]; }
  __device__ __forceinline__ static bool sees(const RowMask& row, int key) {
    return static_cast<unsigned>(key - row.begin) < static_cast<unsigned>(row.count);
  }

  // cap * tanh(x) = cap * (1 - 2 / (1 + e^2x)), to the last bits of a float near 1.
  __device__ __forceinline__ void apply_softcap(Scores<kRowEights>& scores) const {
    for_each_score<kRowEights>(
        [&](int n, int e) { scores[n][e] = rule_.cap - 2 * rule_.cap * device::reciprocal_fast(1 + device::exp2_fast(scores[n][e])); });
  }

  __device__ __forceinline__ void apply_tensor(Scores<kRowEights>& scores, const uint8_t* masks, int tile, int in_tile) const {
    switch (problem_.mask.tensor.dtype) {
      case DType::boolean:
        return with_tensor<uint8_t>(
            masks, tile, in_tile, [](uint8_t keep) { return keep; },
            [&](int n, int e, uint8_t keep) { scores[n][e] = keep ? scores[n][e] : -INFINITY; });
      case DType::f32:
        return with_tensor<float>(
            masks, tile, in_tile, [](float bias) { return to_base_2(bias); }, [&](int n, int e, float bias) { scores[n][e] += bias; });
      case DType::bf16:
        return with_tensor<__nv_bfloat16>(
            masks, tile, in_tile, [](__nv_bfloat16 bias) { return to_base_2(__bfloat162float(bias)); },
            [&](int n, int e, float bias) { scores[n][e] += bias; });
      default:
        return with_tensor<__half>(
            masks, tile, in_tile, [](__half bias) { return __half2float(bias) * kLog2e; },
            [&](int n, int e, float bias) { scores[n][e] += bias; });
    }
  }

  // Calls body(n, e, prepare(element)). Elements of keys that do not count are not read: a tensor may end before them.
  template <class Mask, class Prepare, class Body>
  __device__ __forceinline__ void with_tensor(const uint8_t* masks, int tile, int in_tile, Prepare&& prepare, Body&& body) const {
    const TensorMask& tensor = problem_.mask.tensor;
    if (layout_.tensor.rows == 1) {  // all rows share it
      const auto* element = reinterpret_cast<const Mask*>(masks + rows_[0].tensor_place) + in_tile;
      const auto first = prepare(element[0]), second = prepare(element[8]);
      for_each_score<kRowEights>([&](int n, int e) { body(n, e, e / 2 == 0 ? first : second); });
    } else if (layout_.tensor.rows > 0) {
      for_each_score<kRowEights>([&](int n, int e) {
        body(n, e, prepare(reinterpret_cast<const Mask*>(masks + row_of(n, e).tensor_place)[in_tile + e / 2 * 8]));
      });
    } else {
      for_each_score<kRowEights>([&](int n, int e) {
        const int column = tile + in_tile + e / 2 * 8;
        const RowMask& row = row_of(n, e);
        Mask element = {};
        if (sees(row, column)) element = static_cast<const Mask*>(tensor.data)[row.tensor_row + column * tensor.key_stride];
        body(n, e, prepare(element));
      });
    }
  }

  __device__ __forceinline__ void apply_padding(Scores<kRowEights>& scores, const uint8_t* masks, int tile, int in_tile) const {
    switch (problem_.mask.padding.kind == Padding::Kind::keep ? problem_.mask.padding.dtype : DType::f64) {
      case DType::boolean: return add_filter<uint8_t>(scores, masks, tile, in_tile);
      case DType::i32: return add_filter<int32_t>(scores, masks, tile, in_tile);
      case DType::i64: return add_filter<int64_t>(scores, masks, tile, in_tile);
      default: return add_to_dropped(scores, tile + in_tile < rows_->kept_keys, tile + in_tile + 8 < rows_->kept_keys);
    }
  }

  template <class Mask>
  __device__ __forceinline__ void add_filter(Scores<kRowEights>& scores, const uint8_t* masks, int tile, int in_tile) const {
    const Padding& padding = problem_.mask.padding;
    const int column = tile + in_tile;
    const bool may_keep[2] = {column < rows_->kept_keys, column + 8 < rows_->kept_keys};
    if (layout_.padding.rows == 1) {
      const auto* element = reinterpret_cast<const Mask*>(masks + rows_[0].padding_place) + in_tile;
      add_to_dropped(scores, may_keep[0] && element[0] > 0, may_keep[1] && element[8] > 0);
    } else {
      for_each_score<kRowEights>([&](int n, int e) {
        const RowMask& row = row_of(n, e);
        bool is_kept = may_keep[e / 2];
        if (layout_.padding.rows > 0) {
          is_kept = is_kept && reinterpret_cast<const Mask*>(masks + row.padding_place)[in_tile + e / 2 * 8] > 0;
        } else if (is_kept && sees(row, column + e / 2 * 8)) {
          is_kept = static_cast<const Mask*>(padding.data)[row.padding_row + (column + e / 2 * 8) * padding.key_stride] > 0;
        }
        if (!is_kept) scores[n][e] += rule_.filter;
      });
    }
  }

  __device__ __forceinline__ void add_to_dropped(Scores<kRowEights>& scores, bool keeps_first, bool keeps_second) const {
    const float filters[2] = {keeps_first ? 0.0f : rule_.filter, keeps_second ? 0.0f : rule_.filter};
    for_each_score<kRowEights>([&](int n, int e) { scores[n][e] += filters[e / 2]; });
  }

  const Problem& problem_;
  const ScoreRule& rule_;
  const MaskLayout& layout_;
  const RowMask* rows_ = nullptr;
  const KeySpan* whole_ = nullptr;
};

}  // namespace onnx_attn::decode
