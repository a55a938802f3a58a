// decode_mask.cuh: from the bare products of 16 query rows and 16 keys to the scores that softmax sees, in base 2.
#pragma once

#include <cfloat>

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
__device__ __forceinline__ float to_base_2(float bias) {
  constexpr float kLowest = -2.3e38f;
  return bias < kLowest && bias != -INFINITY ? kLowest * kLog2e : bias * kLog2e;
}

// Everything that decides whether, and by how much, a key counts for the lane's two query rows. The elements of tensor masks
// are loaded a block ahead, and left as they are until they are used: the block before hides the latency.
class BlockMask {
 public:
  __device__ __forceinline__ explicit BlockMask(const Problem& problem) : problem_(problem) {
    const float scale = static_cast<float>(problem.scale), cap = static_cast<float>(problem.softcap);
    unit_ = cap > 0 ? 2 * kLog2e * scale / cap : kLog2e * scale;
    cap_ = cap * kLog2e;
    filter_ = to_base_2(problem.mask.padding.filter);
  }

  __device__ __forceinline__ void start_unit(const Unit& unit, int first_row, int rows) {
    const Mask& mask = problem_.mask;
    const int group = static_cast<int>(problem_.q_heads / problem_.kv_heads), q_len = static_cast<int>(problem_.q_len);
    const RowPosition position = row_position(mask, unit.batch, problem_.q_len, problem_.kv_len);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + lane_index() / 4 + 8 * r;
      const int head = row / q_len, query = row - head * q_len;
      const KeyRange visible = visible_keys(mask, position, query, query + 1);
      const bool sees_any = row < rows && visible.begin < visible.end;
      begin_[r] = sees_any ? static_cast<int>(visible.begin) : 0;
      count_[r] = sees_any ? static_cast<int>(visible.end - visible.begin) : 0;
      tensor_row_[r] = unit.batch * mask.tensor.batch_stride + (int64_t{unit.kv_head} * group + head) * mask.tensor.head_stride +
                       query * mask.tensor.query_stride;
      padding_row_[r] = unit.batch * mask.padding.batch_stride + query * mask.padding.query_stride;
    }
    if (mask.padding.kind == Padding::Kind::lengths) {
      const int64_t length = mask.padding.dtype == DType::i64 ? static_cast<const int64_t*>(mask.padding.data)[padding_row_[0]]
                                                              : static_cast<const int32_t*>(mask.padding.data)[padding_row_[0]];
      kept_keys_ = static_cast<int>(max(int64_t{0}, min(length, problem_.kv_len)));
    } else {
      kept_keys_ = static_cast<int>(min(mask.padding.columns, problem_.kv_len));
    }
  }

  // Loads what tensors say of the block of keys that starts at `key`.
  __device__ __forceinline__ void prefetch(int key) {
    const TensorMask& tensor = problem_.mask.tensor;
    if (tensor.kind != TensorMask::Kind::none) {
      switch (tensor.dtype) {
        case DType::boolean: load<uint8_t>(tensor_, tensor.data, tensor_row_, tensor.key_stride, key, INT_MAX); break;
        case DType::f32: load<uint32_t>(tensor_, tensor.data, tensor_row_, tensor.key_stride, key, INT_MAX); break;
        default: load<uint16_t>(tensor_, tensor.data, tensor_row_, tensor.key_stride, key, INT_MAX); break;
      }
    }
    const Padding& padding = problem_.mask.padding;
    if (padding.kind == Padding::Kind::keep) {
      switch (padding.dtype) {
        case DType::boolean: load<uint8_t>(padding_, padding.data, padding_row_, padding.key_stride, key, kept_keys_); break;
        case DType::i64: load<int64_t>(padding_, padding.data, padding_row_, padding.key_stride, key, kept_keys_); break;
        default: load<int32_t>(padding_, padding.data, padding_row_, padding.key_stride, key, kept_keys_); break;
      }
    }
  }

  // Turns products into scores: scale, softcap, bias and padding, and -inf where a key does not count. The last is a select,
  // never an addition: the product of a key past the length may be NaN.
  __device__ __forceinline__ void apply(Scores& scores, int key) const {
    for_each_score([&](int half, int e, int, int) { scores[half][e] *= unit_; });
    if (problem_.softcap > 0) {  // cap * tanh(x) = cap * (1 - 2 / (1 + e^2x)), to the last bits of a float near 1
      for_each_score([&](int half, int e, int, int) {
        scores[half][e] = cap_ - 2 * cap_ * device::reciprocal_fast(1 + device::exp2_fast(scores[half][e]));
      });
    }
    const TensorMask& tensor = problem_.mask.tensor;
    if (tensor.kind == TensorMask::Kind::keep) {
      for_each_score([&](int half, int e, int, int) { scores[half][e] = tensor_[half][e] ? scores[half][e] : -INFINITY; });
    } else if (tensor.kind == TensorMask::Kind::bias) {
      if (tensor.dtype == DType::f32) {
        for_each_score([&](int half, int e, int, int) { scores[half][e] += to_base_2(__uint_as_float(tensor_[half][e])); });
      } else if (tensor.dtype == DType::bf16) {
        for_each_score([&](int half, int e, int, int) { scores[half][e] += to_base_2(__uint_as_float(tensor_[half][e] << 16)); });
      } else {
        for_each_score([&](int half, int e, int, int) {
          scores[half][e] += to_base_2(__half2float(__ushort_as_half(static_cast<unsigned short>(tensor_[half][e]))));
        });
      }
    }
    const Padding& padding = problem_.mask.padding;
    if (padding.kind != Padding::Kind::none) {
      for_each_score([&](int half, int e, int, int offset) {
        bool is_kept = key + lane_key() + offset < kept_keys_;
        if (padding.kind == Padding::Kind::keep) is_kept = is_kept && static_cast<int>(padding_[half][e]) > 0;
        if (!is_kept) scores[half][e] += filter_;
      });
    }
    for_each_score([&](int half, int e, int row, int offset) {
      if (!sees(row, key + lane_key() + offset)) scores[half][e] = -INFINITY;
    });
  }

 private:
  __device__ __forceinline__ bool sees(int row, int key) const {
    return static_cast<unsigned>(key - begin_[row]) < static_cast<unsigned>(count_[row]);
  }

  // Elements that do not count are not read: the tensor may end before them.
  template <class Raw>
  __device__ __forceinline__ void load(uint32_t (&target)[2][4], const void* data, const int64_t (&rows)[2], int64_t key_stride, int key,
                                       int columns) {
    for_each_score([&](int half, int e, int row, int offset) {
      const int column = key + lane_key() + offset;
      Raw value = 0;
      if (sees(row, column) && column < columns) value = static_cast<const Raw*>(data)[rows[row] + column * key_stride];
      if constexpr (sizeof(Raw) == 8) target[half][e] = value > 0;  // its sign is all that is asked for
      else target[half][e] = static_cast<uint32_t>(value);
    });
  }

  const Problem& problem_;
  float unit_;    // from a product to base 2, or with a softcap to the exponent of e^2x in base 2
  float cap_;
  float filter_;
  int begin_[2], count_[2];  // keys that a row sees, as far as length, causality and windows go
  int64_t tensor_row_[2], padding_row_[2];
  int kept_keys_;
  uint32_t tensor_[2][4], padding_[2][4];
};

}  // namespace onnx_attn::decode
