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

__host__ __device__ constexpr int element_bytes(DType dtype) {
  switch (dtype) {
    case DType::boolean: return 1;
    case DType::f16:
    case DType::bf16: return 2;
    case DType::f32:
    case DType::i32: return 4;
    default: return 8;
  }
}

// What the masks say of a query row of the unit at hand; in shared memory.
struct RowMask {
  int begin, count;    // keys that the row sees, as far as length, causality and windows go
  int64_t tensor_row;  // where the elements of the row begin
  int64_t padding_row;

  // `row` counts the rows of the kv head. Rows that do not exist see nothing.
  __device__ __forceinline__ void set(const Problem& problem, const Unit& unit, int row, int rows) {
    const Mask& mask = problem.mask;
    const int group = static_cast<int>(problem.q_heads / problem.kv_heads), q_len = static_cast<int>(problem.q_len);
    const int head_in_group = row / q_len, query = row - head_in_group * q_len;
    const int64_t head = int64_t{unit.kv_head} * group + head_in_group;
    const KeyRange visible = visible_keys(mask, row_position(mask, unit.batch, problem.q_len, problem.kv_len), query, query + 1);
    const bool sees_any = row < rows && visible.begin < visible.end;
    begin = sees_any ? static_cast<int>(visible.begin) : 0;
    count = sees_any ? static_cast<int>(visible.end - visible.begin) : 0;
    tensor_row = unit.batch * mask.tensor.batch_stride + head * mask.tensor.head_stride + query * mask.tensor.query_stride;
    padding_row = unit.batch * mask.padding.batch_stride + query * mask.padding.query_stride;
  }
};

// Everything that decides whether, and by how much, a key counts for the lane's two query rows. The elements of a tensor mask
// are loaded a block ahead, and left as they are until they are used: the arithmetic between hides the latency.
class BlockMask {
 public:
  __device__ __forceinline__ BlockMask(const Problem& problem, const ScoreRule& rule) : problem_(problem), rule_(rule) {}

  // `rows` are the 16 rows of the warp.
  __device__ __forceinline__ void start_unit(const RowMask* rows) {
    rows_ = rows + lane_index() / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      begin_[r] = rows_[8 * r].begin;
      count_[r] = rows_[8 * r].count;
    }
    const Padding& padding = problem_.mask.padding;
    if (padding.kind == Padding::Kind::lengths) {
      const int64_t at = rows_->padding_row;
      const int64_t length =
          padding.dtype == DType::i64 ? static_cast<const int64_t*>(padding.data)[at] : static_cast<const int32_t*>(padding.data)[at];
      kept_keys_ = static_cast<int>(max(int64_t{0}, min(length, problem_.kv_len)));
    } else {
      kept_keys_ = static_cast<int>(min(padding.columns, problem_.kv_len));
    }
  }

  // Starts loading what the tensor mask says of the block of keys that starts at `key`.
  __device__ __forceinline__ void prefetch_tensor(int key) {
    const TensorMask& tensor = problem_.mask.tensor;
    if (!rule_.is_plain && tensor.kind != TensorMask::Kind::none) {
      switch (tensor.dtype) {
        case DType::boolean: load_tensor<uint8_t>(key); break;
        case DType::f32: load_tensor<uint32_t>(key); break;
        default: load_tensor<uint16_t>(key); break;
      }
    }
  }

  // Reads which keys of the block the padding keeps.
  __device__ __forceinline__ void read_padding(int key) {
    const Padding& padding = problem_.mask.padding;
    if (rule_.is_plain || padding.kind == Padding::Kind::none) return;
    kept_ = 0;
    for_each_score([&](int half, int e, int, int offset) {
      if (key + lane_key() + offset < kept_keys_) kept_ |= 1u << (4 * half + e);
    });
    if (padding.kind == Padding::Kind::keep) {
      switch (padding.dtype) {
        case DType::boolean: keep_positive<uint8_t>(key); break;
        case DType::i64: keep_positive<int64_t>(key); break;
        default: keep_positive<int32_t>(key); break;
      }
    }
  }

  // Turns products into scores: scale, softcap, bias and padding, and -inf where a key does not count. The last is a select,
  // never an addition: the product of a key past the length may be NaN.
  __device__ __forceinline__ void apply(Scores& scores, int key) const {
    for_each_score([&](int half, int e, int, int) { scores[half][e] *= rule_.unit; });
    if (!rule_.is_plain) apply_cap_and_tensors(scores);
    for_each_score([&](int half, int e, int row, int offset) {
      if (!sees(row, key + lane_key() + offset)) scores[half][e] = -INFINITY;
    });
  }

 private:
  __device__ __forceinline__ void apply_cap_and_tensors(Scores& scores) const {
    if (rule_.cap > 0) {  // cap * tanh(x) = cap * (1 - 2 / (1 + e^2x)), to the last bits of a float near 1
      for_each_score([&](int half, int e, int, int) {
        scores[half][e] = rule_.cap - 2 * rule_.cap * device::reciprocal_fast(1 + device::exp2_fast(scores[half][e]));
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
    if (problem_.mask.padding.kind != Padding::Kind::none) {
      for_each_score([&](int half, int e, int, int) {
        if (!(kept_ >> (4 * half + e) & 1)) scores[half][e] += rule_.filter;
      });
    }
  }

  __device__ __forceinline__ bool sees(int row, int key) const {
    return static_cast<unsigned>(key - begin_[row]) < static_cast<unsigned>(count_[row]);
  }

  // Elements of keys that do not count are not read: the tensors may end before them.
  template <class Raw>
  __device__ __forceinline__ void load_tensor(int key) {
    const TensorMask& tensor = problem_.mask.tensor;
    for_each_score([&](int half, int e, int row, int offset) {
      const int column = key + lane_key() + offset;
      tensor_[half][e] = 0;
      if (sees(row, column))
        tensor_[half][e] = static_cast<const Raw*>(tensor.data)[rows_[8 * row].tensor_row + column * tensor.key_stride];
    });
  }

  template <class Raw>
  __device__ __forceinline__ void keep_positive(int key) {
    const Padding& padding = problem_.mask.padding;
    for_each_score([&](int half, int e, int row, int offset) {
      const int column = key + lane_key() + offset;
      const int64_t at = rows_[8 * row].padding_row + column * padding.key_stride;
      const bool is_read = sees(row, column) && column < kept_keys_;
      if (is_read && static_cast<const Raw*>(padding.data)[at] <= 0) kept_ &= ~(1u << (4 * half + e));
    });
  }

  const Problem& problem_;
  const ScoreRule& rule_;
  const RowMask* rows_ = nullptr;
  int begin_[2], count_[2];
  int kept_keys_;
  uint32_t tensor_[2][4];  // raw elements of a block
  uint32_t kept_;          // a bit for each score of a block
};

}  // namespace onnx_attn::decode
