// decode_mask.cuh: from the bare products of 16 query rows and 16 keys to the scores that softmax sees, in base 2.
#pragma once

#include "decode_tile.cuh"

namespace onnx_attn::decode {

inline constexpr float kLog2e = 1.4426950408889634f;

// A block of scores: scores[half][e] is row lane / 4 + 8 * (e / 2) and key 8 * half + 2 * (lane % 4) + e % 2.
using Scores = float[2][4];

template <class Body>
__device__ __forceinline__ void for_each_score(Body&& body) {  // body(half, element, row, key), `key` without the lane's part
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int e = 0; e < 4; ++e) body(half, e, e / 2, 8 * half + e % 2);
}

__device__ __forceinline__ int lane_key() { return 2 * (lane_index() % 4); }

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
    constexpr double kLog2e = 1.4426950408889634;
    unit = static_cast<float>(problem.softcap > 0 ? 2 * kLog2e * problem.scale / problem.softcap : kLog2e * problem.scale);
    cap = static_cast<float>(problem.softcap * kLog2e);
    filter = to_base_2(problem.mask.padding.filter);
    is_plain =
        !(problem.softcap > 0) && problem.mask.tensor.kind == TensorMask::Kind::none && problem.mask.padding.kind == Padding::Kind::none;
  }
};

// Where the elements of a tensor mask, or of a padding mask, begin for a row of the kv head.
__device__ __forceinline__ int64_t tensor_mask_row(const Problem& problem, const Unit& unit, int row) {
  const TensorMask& tensor = problem.mask.tensor;
  const int group = static_cast<int>(problem.q_heads / problem.kv_heads), q_len = static_cast<int>(problem.q_len);
  const int head_in_group = row / q_len, query = row - head_in_group * q_len;
  return unit.batch * tensor.batch_stride + (int64_t{unit.kv_head} * group + head_in_group) * tensor.head_stride +
         query * tensor.query_stride;
}
__device__ __forceinline__ int64_t padding_mask_row(const Problem& problem, const Unit& unit, int row) {
  const Padding& padding = problem.mask.padding;
  return unit.batch * padding.batch_stride + row % static_cast<int>(problem.q_len) * padding.query_stride;
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

// Everything that decides whether, and by how much, a key counts for the lane's two query rows. Tensors with neighbouring keys
// come with the stage, since a load of one's own would queue for microseconds behind those of the ring; others are gathered.
class BlockMask {
 public:
  __device__ __forceinline__ BlockMask(const Problem& problem, const ScoreRule& rule, const MaskLayout& layout)
      : problem_(problem), rule_(rule), layout_(layout) {}

  // `rows` are the 16 rows of the warp.
  __device__ __forceinline__ void start_unit(const RowMask* rows) {
    rows_ = rows + lane_index() / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      begin_[r] = rows_[8 * r].begin;
      count_[r] = rows_[8 * r].count;
    }
  }

  // Turns products into scores: scale, softcap, bias and padding, and -inf where a key does not count. The last is a select,
  // never an addition: the product of a key past the length may be NaN. The block starts at key tile + key; `masks` are those
  // of the tile.
  __device__ __forceinline__ void apply(Scores& scores, const uint8_t* masks, int tile, int key) const {
    for_each_score([&](int half, int e, int, int) { scores[half][e] *= rule_.unit; });
    if (!rule_.is_plain) {
      if (rule_.cap > 0) apply_softcap(scores);
      if (problem_.mask.tensor.kind != TensorMask::Kind::none) apply_tensor(scores, masks, tile, key);
      if (problem_.mask.padding.kind != Padding::Kind::none) apply_padding(scores, masks, tile, key);
    }
    for_each_score([&](int half, int e, int row, int offset) {
      if (!sees(row, tile + key + lane_key() + offset)) scores[half][e] = -INFINITY;
    });
  }

 private:
  __device__ __forceinline__ bool sees(int row, int key) const {
    return static_cast<unsigned>(key - begin_[row]) < static_cast<unsigned>(count_[row]);
  }

  // cap * tanh(x) = cap * (1 - 2 / (1 + e^2x)), to the last bits of a float near 1.
  __device__ __forceinline__ void apply_softcap(Scores& scores) const {
    for_each_score([&](int half, int e, int, int) {
      scores[half][e] = rule_.cap - 2 * rule_.cap * device::reciprocal_fast(1 + device::exp2_fast(scores[half][e]));
    });
  }

  __device__ __forceinline__ void apply_tensor(Scores& scores, const uint8_t* masks, int tile, int key) const {
    switch (problem_.mask.tensor.dtype) {
      case DType::boolean:
        return with_tensor<uint8_t>(masks, tile, key,
                                    [&](int half, int e, uint8_t keep) { scores[half][e] = keep ? scores[half][e] : -INFINITY; });
      case DType::f32:
        return with_tensor<float>(masks, tile, key, [&](int half, int e, float bias) { scores[half][e] += to_base_2(bias); });
      case DType::bf16:
        return with_tensor<__nv_bfloat16>(
            masks, tile, key, [&](int half, int e, __nv_bfloat16 bias) { scores[half][e] += to_base_2(__bfloat162float(bias)); });
      default:
        return with_tensor<__half>(masks, tile, key,
                                   [&](int half, int e, __half bias) { scores[half][e] += to_base_2(__half2float(bias)); });
    }
  }

  __device__ __forceinline__ void apply_padding(Scores& scores, const uint8_t* masks, int tile, int key) const {
    switch (problem_.mask.padding.kind == Padding::Kind::keep ? problem_.mask.padding.dtype : DType::f64) {
      case DType::boolean: return add_filter<uint8_t>(scores, masks, tile, key);
      case DType::i32: return add_filter<int32_t>(scores, masks, tile, key);
      case DType::i64: return add_filter<int64_t>(scores, masks, tile, key);
      default:
        for_each_score([&](int half, int e, int, int offset) {
          if (tile + key + lane_key() + offset >= rows_->kept_keys) scores[half][e] += rule_.filter;
        });
    }
  }

  // Calls body(half, e, element). Elements of keys that do not count are not read: a tensor may end before them.
  template <class Mask, class Body>
  __device__ __forceinline__ void with_tensor(const uint8_t* masks, int tile, int key, Body&& body) const {
    const TensorMask& tensor = problem_.mask.tensor;
    if (layout_.tensor.rows > 0) {
      for_each_score([&](int half, int e, int row, int offset) {
        body(half, e, *reinterpret_cast<const Mask*>(masks + rows_[8 * row].tensor_place + (key + lane_key() + offset) * sizeof(Mask)));
      });
    } else {
      for_each_score([&](int half, int e, int row, int offset) {
        const int column = tile + key + lane_key() + offset;
        Mask element = {};
        if (sees(row, column)) element = static_cast<const Mask*>(tensor.data)[rows_[8 * row].tensor_row + column * tensor.key_stride];
        body(half, e, element);
      });
    }
  }

  template <class Mask>
  __device__ __forceinline__ void add_filter(Scores& scores, const uint8_t* masks, int tile, int key) const {
    const Padding& padding = problem_.mask.padding;
    for_each_score([&](int half, int e, int row, int offset) {
      const int in_tile = key + lane_key() + offset, column = tile + in_tile;
      bool is_kept = column < rows_->kept_keys;
      if (layout_.padding.rows > 0) {
        is_kept = is_kept && *reinterpret_cast<const Mask*>(masks + rows_[8 * row].padding_place + in_tile * sizeof(Mask)) > 0;
      } else if (is_kept && sees(row, column)) {
        is_kept = static_cast<const Mask*>(padding.data)[rows_[8 * row].padding_row + column * padding.key_stride] > 0;
      }
      if (!is_kept) scores[half][e] += rule_.filter;
    });
  }

  const Problem& problem_;
  const ScoreRule& rule_;
  const MaskLayout& layout_;
  const RowMask* rows_ = nullptr;
  int begin_[2], count_[2];
};

}  // namespace onnx_attn::decode
