// forward_only.cpp: the calls behind forward_only.h. The stable ABI can neither make a graph node nor ask a tensor for requires_grad, so
// both are small ops, which autograd.py gives a kernel on the Autograd keys. Below those, and in a process without Python, they do nothing.
#include "forward_only.h"

#include <array>

#include "plan_record.h"

namespace onnx_attn {

namespace {

using torch::stable::detail::from;
using torch::stable::detail::to;

template <typename... Arguments>
StableIValue call(const char* op, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack{from(arguments)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, "", stack.data(), TORCH_ABI_VERSION));
  return stack[0];
}

void hang_refusal(std::vector<Tensor>, std::vector<Tensor>) {}

bool requires_gradient(const Tensor&) { return false; }

}  // namespace

void refuse_backward(const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs) {
  call("onnx_attn::_hang_refusal", outputs, inputs);
}

void check_no_gradient(const Tensor& written, const char* name) {
  if (!aoti_torch_grad_mode_is_enabled()) return;
  ONNX_ATTN_CHECK(!to<bool>(call("onnx_attn::_requires_gradient", written)), name,
                  ": requires a gradient, but is written in place and onnx_attn is forward only; detach it");
}

void count_write(const Tensor& written) {
  if (plan_record::is_recording()) return;                    // nothing is written
  if (to<bool>(call("aten::is_inference", written))) return;  // these have no version to count
  // To torch an axis swapped with itself is a write like any other.
  to<Tensor>(call("aten::transpose_", written, int64_t{0}, int64_t{0}));
}

STABLE_TORCH_LIBRARY_IMPL(onnx_attn, CompositeExplicitAutograd, m) {
  m.impl("_hang_refusal", TORCH_BOX(&hang_refusal));
  m.impl("_requires_gradient", TORCH_BOX(&requires_gradient));
}

}  // namespace onnx_attn
