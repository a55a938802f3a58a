// problem.h: one attention call, checked and reduced to sizes, pointers and strides. The vocabulary of every layer below torch.
#pragma once

#include <cstdint>

#include "mask.h"

namespace onnx_attn {

// A view with axes [batch, head, row, column]. Strides are in elements; the column stride is 1.
// The same struct describes BHSD, BSHD, 3-D [batch, row, head * column], packed QKV and cache layouts.
struct Tensor4 {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
};

// Rows that join the keys and values before attention runs. Problem::k and Problem::v are then the buffers being
// written (a fresh `present`, or a cache that the caller owns).
struct Append {
  bool active = false;
  Tensor4 new_k;  // [batch, kv_heads, new_len, head_size]
  Tensor4 new_v;  // [batch, kv_heads, new_len, v_head_size]
  int64_t new_len = 0;
  Tensor4 past_k;  // [batch, kv_heads, past_len, head_size], copied to rows [0, past_len) first; null data: in place already
  Tensor4 past_v;  // [batch, kv_heads, past_len, v_head_size]
  int64_t past_len = 0;
  Lengths first_row;  // row where the first new key goes; null data: past_len. Rows outside [0, kv_len) are dropped.
};

// com.microsoft beam search: past row j of batch entry b is read from the cache of entry (b / width) * width + index[b, j].
struct Beams {
  const int32_t* index = nullptr;  // [batch, kv_len], on the device; null: every entry reads its own cache
  int64_t batch_stride = 0;        // row_stride is 1
  int64_t width = 1;
  Lengths past;  // rows below this length are indirect, later ones are the entry's own
};

// The optional [batch, q_heads, q_len, kv_len] output.
enum class ScoreMode : int8_t {
  none = -1,
  raw = 0,         // scale * Q K^T; defined at masked cells too
  capped = 1,      // after softcap; defined at masked cells too
  masked = 2,      // after mask and bias; -inf where a key is not allowed
  weights = 3,     // after softmax; rows without an allowed key are 0
  mha_logits = 4,  // com.microsoft qk: masked, but cells cut by causality hold score + float32 lowest instead of -inf
};

struct Problem {
  DType dtype = DType::f32;    // of Q, K, biases and Y
  DType v_dtype = DType::f32;  // of V; may differ from dtype
  DType compute = DType::f32;  // scores, softmax and accumulation: f64 for f64 inputs or softmax_precision = 11, else f32

  int64_t batch = 0;
  int64_t q_heads = 0;  // a multiple of kv_heads; query head h reads kv head h / (q_heads / kv_heads)
  int64_t kv_heads = 0;
  int64_t q_len = 0;
  int64_t kv_len = 0;       // rows of k and v: past + new, or the capacity of a cache
  int64_t head_size = 0;    // >= 1
  int64_t v_head_size = 0;  // >= 0

  Tensor4 q;  // [batch, q_heads, q_len, head_size]
  Tensor4 k;  // [batch, kv_heads, kv_len, head_size]; written first when append.active
  Tensor4 v;  // [batch, kv_heads, kv_len, v_head_size]; likewise
  Tensor4 y;  // [batch, q_heads, q_len, v_head_size], output, dtype `dtype`

  // com.microsoft projection bias, of dtype `dtype`, added to incoming rows: to Q as it is read, and to K and V either
  // by the append (which stores the sum) or, without one, as they are read. Null: none.
  const void* q_bias = nullptr;  // [q_heads, head_size]
  const void* k_bias = nullptr;  // [kv_heads, head_size]
  const void* v_bias = nullptr;  // [kv_heads, v_head_size]

  double scale = 1.0;    // multiplies Q K^T; 0 is a real scale
  double softcap = 0.0;  // cap * tanh(score / cap); 0 = none
  Mask mask;
  Append append;
  Beams beams;

  ScoreMode score_mode = ScoreMode::none;
  void* scores = nullptr;  // [batch, q_heads, q_len, kv_len], contiguous, dtype `dtype`; null unless score_mode != none
  float* lse = nullptr;    // [batch, q_heads, q_len], contiguous, natural log-sum-exp, -inf for empty rows; or null
};

}  // namespace onnx_attn
