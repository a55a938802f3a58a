// attention_op.h: what the attention operators share: ai.onnx::Attention's attributes, their checks, and its attn_mask.
#pragma once

#include "torch_bridge.h"

namespace onnx_attn {

struct AttentionAttributes {
  bool is_causal = false;
  int64_t q_num_heads = 0;
  int64_t kv_num_heads = 0;
  std::optional<double> scale;
  double softcap = 0.0;
  std::optional<int64_t> softmax_precision;
  int64_t left_window_size = -1;
  int64_t right_window_size = -1;
};

// Fills problem's sizes, dtypes, scale, softcap and window from Q, K, V and the attributes, checking each. Q, K and V are replaced
// by copies where their last axis is not contiguous; problem.q is set, K and V are left to the caller. kv_len is set to K's rows.
void describe_inputs(Problem& problem, Tensor& Q, Tensor& K, Tensor& V, const AttentionAttributes& attributes);

// Checks attn_mask against [batch, q_heads, q_len, kv_len] and points problem's tensor mask at it. `mask` keeps a converted copy alive.
void describe_attn_mask(Problem& problem, OptionalTensor& mask, const Tensor& Q);

// K and V as views of [batch, kv_heads, rows, columns], whatever their rank.
Tensor4 view_keys(const Problem& problem, const Tensor& K);
Tensor4 view_values(const Problem& problem, const Tensor& V);

// Y: 3-D like a 3-D Q, else 4-D in Q's axis order. Points problem.y at it.
Tensor allocate_output(Problem& problem, const Tensor& Q);

}  // namespace onnx_attn
