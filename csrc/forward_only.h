// forward_only.h: what kernels owe autograd. A call on plain CPU or CUDA tensors skips the dispatcher's Autograd keys, where a Python
// kernel would double its host time (torch_onnx_attn/autograd.py), so here is where its outputs get the node that refuses a backward pass.
#pragma once

#include <tuple>
#include <utility>
#include <vector>

#include "torch_bridge.h"

namespace onnx_attn {

// Hangs on the outputs a node whose backward pass raises, if any of the inputs requires a gradient. Where autograd does not look (in
// inference mode, below a mode or a transform that has seen to it) torch's dispatcher turns this into nothing.
void refuse_backward(const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs);

// Before a tensor is written in place: raises if it requires a gradient.
void check_no_gradient(const Tensor& written, const char* name);

// After it was: a backward pass that saved the tensor notices.
void count_write(const Tensor& written);

namespace detail {

inline void collect(std::vector<Tensor>& tensors, const Tensor& tensor) { tensors.push_back(tensor); }
inline void collect(std::vector<Tensor>& tensors, const OptionalTensor& tensor) {
  if (tensor) tensors.push_back(*tensor);
}
template <typename... Members>
void collect(std::vector<Tensor>& tensors, const std::tuple<Members...>& members) {
  std::apply([&](const Members&... member) { (collect(tensors, member), ...); }, members);
}
template <typename Attribute>
void collect(std::vector<Tensor>&, const Attribute&) {}

template <typename... Values>
std::vector<Tensor> tensors_among(const Values&... values) {
  std::vector<Tensor> tensors;
  (collect(tensors, values), ...);
  return tensors;
}

}  // namespace detail

// `kernel`, and a refusal hung on its outputs where gradients may be recorded: TORCH_BOX(&ForwardOnly<&kernel>::call).
template <auto kernel>
struct ForwardOnly;

template <typename Outputs, typename... Parameters, Outputs (*kernel)(Parameters...)>
struct ForwardOnly<kernel> {
  static Outputs call(Parameters... arguments) {
    if (!aoti_torch_grad_mode_is_enabled()) return kernel(std::forward<Parameters>(arguments)...);
    const std::vector<Tensor> inputs = detail::tensors_among(arguments...);
    Outputs outputs = kernel(std::forward<Parameters>(arguments)...);
    refuse_backward(detail::tensors_among(outputs), inputs);
    return outputs;
  }
};

}  // namespace onnx_attn
