// plan_record.cpp: the per-thread recording behind torch_onnx_attn.explain.
#include "plan_record.h"

#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "torch_bridge.h"

namespace onnx_attn {
namespace plan_record {

namespace {
thread_local bool recording = false;
thread_local std::optional<Device> machine;
thread_local std::optional<Plan> last_plan;
}  // namespace

bool is_recording() { return recording; }

const Device* pretended_device() { return machine ? &*machine : nullptr; }

void store(const Plan& plan) { last_plan = plan; }

std::string as_json(const Plan& plan) {
  std::string refusals, separator;
  for (int kernel = 0; kernel < kKernels; ++kernel) {
    if (!plan.refusals[kernel]) continue;
    refusals += separator + "\"" + kernel_name(static_cast<Kernel>(kernel)) + "\": \"" + plan.refusals[kernel] + "\"";
    separator = ", ";
  }
  const auto text = [](bool value) { return value ? "true" : "false"; };
  return std::string("{\"kernel\": \"") + kernel_name(plan.kernel) + "\", \"refusals\": {" + refusals +
         "}, \"separate_append\": " + text(plan.separate_append) + ", \"separate_bias\": " + text(plan.separate_bias) +
         ", \"separate_scores\": " + text(plan.separate_scores) + ", \"workspace_bytes\": " + std::to_string(plan.workspace_bytes) + "}";
}

}  // namespace plan_record

namespace {

// While recording, calls on this thread are planned and not run, for the machine [is_cuda, capability, sm_count, max_shared_memory]
// or, with [], for that of the tensors.
void record_plans(bool record, std::vector<int64_t> device) {
  ONNX_ATTN_CHECK(device.empty() || device.size() == 4, "device: has ", device.size(), " numbers; expected none or 4");
  plan_record::recording = record;
  plan_record::machine.reset();
  if (record) plan_record::last_plan.reset();
  if (device.empty()) return;
  plan_record::machine = Device{device[0] != 0, static_cast<int>(device[1]), static_cast<int>(device[2]), device[3]};
}

// The last recorded plan as JSON text in a uint8 tensor (strings leak in the stable ABI of torch 2.11), or None.
OptionalTensor recorded_plan() {
  if (!plan_record::last_plan) return std::nullopt;
  const std::string text = plan_record::as_json(*plan_record::last_plan);
  const int64_t size = static_cast<int64_t>(text.size());
  Tensor bytes = torch::stable::empty({size}, ScalarType::Byte);
  std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  return bytes;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(onnx_attn, CompositeExplicitAutograd, m) {
  m.impl("_record_plans", TORCH_BOX(&record_plans));
  m.impl("_recorded_plan", TORCH_BOX(&recorded_plan));
}

}  // namespace onnx_attn
