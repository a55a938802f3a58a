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
struct Recording {
  std::optional<Device> machine;
  std::optional<Plan> last_plan;
};

thread_local std::vector<Recording> recordings;  // one inside the other, the innermost last
}  // namespace

bool is_recording() { return !recordings.empty(); }

const Device* pretended_device() {
  const std::optional<Device>& machine = recordings.back().machine;
  return machine ? &*machine : nullptr;
}

void store(const Plan& plan) { recordings.back().last_plan = plan; }

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

// Begins a recording: until its end, calls on this thread are planned and not run, for the machine [is_cuda, capability, sm_count,
// max_shared_memory] or, with [], for that of the tensors.
void begin_recording(std::vector<int64_t> device) {
  ONNX_ATTN_CHECK(device.empty() || device.size() == 4, "device: has ", device.size(), " numbers; expected none or 4");
  plan_record::Recording recording;
  if (!device.empty()) recording.machine = Device{device[0] != 0, static_cast<int>(device[1]), static_cast<int>(device[2]), device[3]};
  plan_record::recordings.push_back(recording);
}

// Ends the innermost recording. Returns its last plan as JSON text in a uint8 tensor (strings leak in the stable ABI of torch 2.11), or
// None.
OptionalTensor end_recording() {
  ONNX_ATTN_CHECK(plan_record::is_recording(), "onnx_attn: this thread records no plans");
  const std::optional<Plan> plan = plan_record::recordings.back().last_plan;
  plan_record::recordings.pop_back();
  if (!plan) return std::nullopt;
  const std::string text = plan_record::as_json(*plan);
  const int64_t size = static_cast<int64_t>(text.size());
  Tensor bytes = torch::stable::empty({size}, ScalarType::Byte);
  std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  return bytes;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(onnx_attn, CompositeExplicitAutograd, m) {
  m.impl("_begin_recording", TORCH_BOX(&begin_recording));
  m.impl("_end_recording", TORCH_BOX(&end_recording));
}

}  // namespace onnx_attn
