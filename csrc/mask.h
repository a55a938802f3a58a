// mask.h: every fact about which scores count, in one descriptor that host and device read alike.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define ONNX_ATTN_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define ONNX_ATTN_HOST_DEVICE inline
#endif

namespace onnx_attn {

enum class DType : int8_t { f64, f32, f16, bf16, boolean, i32, i64 };

// Bytes of an element; of a floating one with fewer questions, for the device.
ONNX_ATTN_HOST_DEVICE constexpr int float_bytes(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }
ONNX_ATTN_HOST_DEVICE constexpr int element_bytes(DType dtype) {
  return dtype == DType::boolean ? 1 : dtype == DType::i64 ? 8 : dtype == DType::i32 ? 4 : float_bytes(dtype);
}

// One count for each batch entry, read where the kernel runs and never by the host on CUDA:
// clamp(data[batch * stride] + addend, 0, limit), with the limit given by the reader.
struct Lengths {
  const void* data = nullptr;  // null: no counts, every entry uses the limit
  DType dtype = DType::i64;    // i64 or i32
  int64_t stride = 0;          // 0: one count serves all entries
  int64_t addend = 0;

  ONNX_ATTN_HOST_DEVICE int64_t unclamped(int64_t batch) const {
    const int64_t count =
        dtype == DType::i64 ? static_cast<const int64_t*>(data)[batch * stride] : static_cast<const int32_t*>(data)[batch * stride];
    return count + addend;
  }
  ONNX_ATTN_HOST_DEVICE int64_t at(int64_t batch, int64_t limit) const {
    if (!data) return limit;
    const int64_t count = unclamped(batch);
    return count < 0 ? 0 : count > limit ? limit : count;
  }
};

// A tensor over [batch, head, query, key]: attention's attn_mask, or the contrib operator's attention_bias.
struct TensorMask {
  enum class Kind : int8_t { none, keep, bias };  // absent; bool, true keeps; added to the score after softcap
  Kind kind = Kind::none;
  DType dtype = DType::boolean;  // boolean for keep; f64, f32, f16 or bf16 for bias
  const void* data = nullptr;
  int64_t batch_stride = 0;  // in elements; 0 = broadcast. Any stride may be 0, the key stride included.
  int64_t head_stride = 0;
  int64_t query_stride = 0;
  int64_t key_stride = 0;
  int64_t columns = 0;  // keys that the tensor speaks of; later keys are not allowed
};

// com.microsoft key_padding_mask: a key that is not kept gets `filter` added to its score; it is not excluded.
struct Padding {
  enum class Kind : int8_t { none, lengths, keep };
  Kind kind = Kind::none;
  DType dtype = DType::i32;    // i32, i64 or boolean
  const void* data = nullptr;  // lengths: [batch], key t is kept when t < length. keep: kept where the value is > 0.
  int64_t batch_stride = 0;
  int64_t query_stride = 0;  // 0 for a mask without a query axis
  int64_t key_stride = 0;
  int64_t columns = 0;  // of a keep mask; later keys are not kept
  float filter = -10000.0f;
};

// Larger windows see everything; the bound keeps sums with positions inside 64 bits.
inline constexpr int64_t kLargestWindow = int64_t{1} << 40;

// Query row i of batch entry b stands at key position i + offset(b). Key j is allowed when
//   j < length(b)  and  position - left <= j <= position + right  and  the tensor mask keeps it.
struct Mask {
  Lengths lengths;                     // valid keys; keys at or past the length never contribute, whatever they hold
  int64_t left = -1;                   // keys before the position that count, at most kLargestWindow; -1 = all
  int64_t right = -1;                  // keys after the position that count, likewise; -1 = all. Causal is right = 0.
  bool offset_follows_length = false;  // offset(b) = length(b) - q_len; else `offset`
  int64_t offset = 0;
  TensorMask tensor;
  Padding padding;
};

}  // namespace onnx_attn
