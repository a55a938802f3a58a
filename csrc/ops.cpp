// ops.cpp: the schemas of torch.ops.onnx_attn. Kernels are registered at the bottom of the files that implement them.
#include <torch/csrc/stable/library.h>

// Attributes of ai.onnx::Attention, in ONNX's names. q_num_heads and kv_num_heads are needed for 3-D inputs only (0 = not given).
#define ATTENTION_ATTRIBUTES                                                                            \
  "bool is_causal=False, int q_num_heads=0, int kv_num_heads=0, float? scale=None, float softcap=0.0, " \
  "int? softmax_precision=None, int left_window_size=-1, int right_window_size=-1"
#define ATTENTION_INPUTS "Tensor Q, Tensor K, Tensor V, Tensor? attn_mask=None, *, "

// Attributes of com.microsoft::MultiHeadAttention.
#define MHA_ATTRIBUTES "int num_heads, float scale=0.0, float mask_filter_value=-10000.0, bool unidirectional=False"
#define MHA_INPUTS                                                                                         \
  "Tensor query, Tensor? key=None, Tensor? value=None, Tensor? bias=None, Tensor? key_padding_mask=None, " \
  "Tensor? attention_bias=None, *, "

// One overload for each set of outputs, so that every output of a call means something. A packet call takes the first overload
// whose arguments fit. past_value is optional, and nonpad_kv_seqlen present, in the kv overloads only to give their misuse our own message.
STABLE_TORCH_LIBRARY(onnx_attn, m) {
  m.def("attention(" ATTENTION_INPUTS "Tensor? nonpad_kv_seqlen=None, " ATTENTION_ATTRIBUTES ") -> Tensor");
  m.def("attention.kv(" ATTENTION_INPUTS "Tensor past_key, Tensor? past_value=None, Tensor? nonpad_kv_seqlen=None, " ATTENTION_ATTRIBUTES
        ") -> (Tensor Y, Tensor present_key, Tensor present_value)");
  m.def("attention.qk(" ATTENTION_INPUTS "Tensor? nonpad_kv_seqlen=None, int qk_matmul_output_mode, " ATTENTION_ATTRIBUTES
        ") -> (Tensor Y, Tensor qk_matmul_output)");
  m.def("attention.kv_qk(" ATTENTION_INPUTS
        "Tensor past_key, Tensor? past_value=None, Tensor? nonpad_kv_seqlen=None, int qk_matmul_output_mode, " ATTENTION_ATTRIBUTES
        ") -> (Tensor Y, Tensor present_key, Tensor present_value, Tensor qk_matmul_output)");
  m.def("attention.lse(" ATTENTION_INPUTS "Tensor? nonpad_kv_seqlen=None, bool return_lse, " ATTENTION_ATTRIBUTES
        ") -> (Tensor Y, Tensor lse)");

  m.def("mha(" MHA_INPUTS MHA_ATTRIBUTES ") -> Tensor");
  m.def("mha.kv(" MHA_INPUTS "Tensor past_key, Tensor? past_value=None, " MHA_ATTRIBUTES
        ") -> (Tensor output, Tensor present_key, Tensor present_value)");
  m.def("mha.qk(" MHA_INPUTS "bool output_qk, " MHA_ATTRIBUTES ") -> (Tensor output, Tensor qk)");
  m.def("mha.kv_qk(" MHA_INPUTS "Tensor past_key, Tensor? past_value=None, bool output_qk, " MHA_ATTRIBUTES
        ") -> (Tensor output, Tensor present_key, Tensor present_value, Tensor qk)");
  m.def("mha.shared(" MHA_INPUTS
        "Tensor(a!) past_key, Tensor(b!) past_value, Tensor past_sequence_length, Tensor? cache_indirection=None, " MHA_ATTRIBUTES
        ") -> Tensor");
  // What mha.shared means without writing its arguments: the form that the ONNX exporter sees.
  m.def("mha.shared_functional(" MHA_INPUTS
        "Tensor past_key, Tensor past_value, Tensor past_sequence_length, Tensor? cache_indirection=None, " MHA_ATTRIBUTES
        ") -> (Tensor output, Tensor present_key, Tensor present_value)");

  m.def("tensor_scatter(Tensor past_cache, Tensor update, Tensor? write_indices=None, *, int axis=-2, bool circular=False) -> Tensor");
  m.def("tensor_scatter_(Tensor(a!) cache, Tensor update, Tensor? write_indices=None, *, int axis=-2, bool circular=False) -> ()");
  m.def(
      "attention_cached(Tensor Q, Tensor K, Tensor V, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor cache_lengths, *, "
      "Tensor? attn_mask=None, " ATTENTION_ATTRIBUTES ") -> Tensor");
  m.def("valid_kv_length(Tensor attn_mask) -> Tensor");

  // Not public: what forward_only.h asks of autograd, what the build holds, and the plan of a call without running it.
  m.def("_hang_refusal(Tensor(a!)[] outputs, Tensor[] inputs) -> ()");
  m.def("_requires_gradient(Tensor written) -> bool");
  m.def("_build_info() -> int[]");
  m.def("_prefer_kernels(int[] text) -> ()");
  m.def("_begin_recording(int[] device) -> ()");
  m.def("_end_recording() -> Tensor?");
}
