// plan.cpp: every choice between kernels, with its reason.
#include "plan.h"

namespace onnx_attn {

const char* kernel_name(Kernel kernel) {
  switch (kernel) {
    case Kernel::nothing: return "nothing";
    case Kernel::cpu: return "cpu";
    case Kernel::general: return "general";
  }
  return "unknown";
}

Plan make_plan(const Problem& problem, const Device& device) {
  Plan plan;
  plan.separate_append = problem.append.active;
  const bool has_rows = problem.batch > 0 && problem.q_heads > 0 && problem.q_len > 0;
  if (!has_rows) return plan;
  plan.kernel = device.is_cuda ? Kernel::general : Kernel::cpu;
  return plan;
}

}  // namespace onnx_attn
