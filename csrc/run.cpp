// run.cpp: the step from a checked Problem to kernels: device, stream, plan, launch.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "plan_record.h"
#include "preference.h"
#include "torch_bridge.h"

#ifdef ONNX_ATTN_WITH_CUDA
// Exported by libtorch_cuda; weak, so that one binary loads under CPU builds of torch too.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**);
#endif

namespace onnx_attn {

namespace {

[[noreturn]] void refuse_device(const Tensor& like) {
  if (like.is_cuda()) fail("onnx_attn: this build has no CUDA kernels; rebuild torch-onnx-attn on a machine with nvcc");
  fail("onnx_attn: only cpu and cuda tensors are supported");
}

void parallel_for(int64_t count, const std::function<void(int64_t, int64_t)>& body) { torch::stable::parallel_for(0, count, 1, body); }

bool is_logging() {
  static const bool logging = [] {
    const char* value = std::getenv("TORCH_ONNX_ATTN_LOG");
    return value && *value && std::string(value) != "0";
  }();
  return logging;
}

Plan plan_for(const Problem& problem, const Device& device) {
  std::string error;
  const Preference& preference = current_preference(error);
  ONNX_ATTN_CHECK(error.empty(), error);
  const Plan plan = make_plan(problem, device, preference);
  if (is_logging()) std::fprintf(stderr, "torch_onnx_attn: %s\n", plan_record::as_json(plan).c_str());
  return plan;
}

void check_followed(const Plan& plan) { ONNX_ATTN_CHECK(!plan.error, "kernel: the wish for a kernel cannot be followed: ", plan.error); }

void run_cpu(const Problem& problem) {
  const Plan plan = plan_for(problem, Device{});
  if (plan.separate_append) cpu::append(problem, parallel_for);
  if (plan.kernel == Kernel::cpu) cpu::attention(after_separate_steps(problem, plan, nullptr), parallel_for);
}

#ifdef ONNX_ATTN_WITH_CUDA

void* current_stream(const Tensor& like) {
  ONNX_ATTN_CHECK(aoti_torch_get_current_cuda_stream, "onnx_attn: the loaded libtorch has no CUDA");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(like.get_device_index(), &stream));
  return stream;
}

void check_launch(int error, const char* what) { ONNX_ATTN_CHECK(error == 0, "onnx_attn: ", what, " failed: ", cuda::error_text(error)); }

Device device_of(const Tensor& like) {
  Device device;
  check_launch(cuda::query_device(like.get_device_index(), &device), "device query");
  return device;
}

// Stores K + k_bias and V + v_bias as an append to empty buffers.
Problem bias_as_append(const Problem& problem, const Problem& attended) {
  Problem storing = problem;
  storing.append.active = true;
  storing.append.new_k = problem.k;
  storing.append.new_v = problem.v;
  storing.append.new_len = problem.kv_len;
  storing.k = attended.k;
  storing.v = attended.v;
  return storing;
}

void launch_attention(const Problem& problem, const Plan& plan, const Device& device, void* workspace, void* stream) {
  switch (plan.kernel) {
    case Kernel::decode: return check_launch(cuda::decode(problem, device, workspace, stream), "decode kernel");
#ifndef ONNX_ATTN_WITHOUT_SM90
    case Kernel::forward_short: return check_launch(cuda::forward_short(problem, device, stream), "forward_short kernel");
    case Kernel::forward_sm90: return check_launch(cuda::forward_sm90(problem, device, workspace, stream), "forward_sm90 kernel");
#endif
    case Kernel::forward_sm80: return check_launch(cuda::forward_sm80(problem, plan, stream), "forward_sm80 kernel");
    case Kernel::forward_float32: return check_launch(cuda::forward_float32(problem, plan, workspace, stream), "forward_float32 kernel");
    case Kernel::general: return check_launch(cuda::general(problem, plan, stream), "general kernel");
    default: return;
  }
}

int launch_scores(const Problem& problem, const Device& device, void* workspace, void* stream) {
#ifndef ONNX_ATTN_WITHOUT_SM90
  if (device.capability == 90) return cuda::scores_sm90(problem, device, workspace, stream);
#endif
  return cuda::scores(problem, device, workspace, stream);
}

void run_cuda(const Problem& problem, const Tensor& like) {
  const Device device = device_of(like);
  const Plan plan = plan_for(problem, device);
  check_followed(plan);
  void* stream = current_stream(like);
  OptionalTensor workspace;  // given back to the caching allocator on return, which keeps it until the stream has passed
  void* scratch = nullptr;
  if (plan.workspace_bytes > 0) {
    workspace = empty_contiguous(like, ScalarType::Byte, {plan.workspace_bytes});
    scratch = workspace->mutable_data_ptr();
  }
  const Problem attended = after_separate_steps(problem, plan, scratch);
  if (plan.separate_append) check_launch(cuda::append(problem, stream), "append");
  if (plan.separate_bias) check_launch(cuda::append(bias_as_append(problem, attended), stream), "projection bias");
  void* kernel_workspace = static_cast<char*>(scratch) + separate_bytes(problem, plan);
  launch_attention(attended, plan, device, kernel_workspace, stream);
  if (!plan.separate_scores) return;
  check_launch(launch_scores(scores_problem(problem, attended), device, kernel_workspace, stream), "scores kernel");
}

#endif

Device own_device(const Tensor& like) {
#ifdef ONNX_ATTN_WITH_CUDA
  if (like.is_cuda()) return device_of(like);
#endif
  return Device{};
}

}  // namespace

void run(const Problem& problem, const Tensor& like) {
  if (plan_record::is_recording()) {
    const Device* pretended = plan_record::pretended_device();
    const Plan plan = plan_for(problem, pretended ? *pretended : own_device(like));
    check_followed(plan);
    return plan_record::store(plan);
  }
  if (like.is_cpu()) return run_cpu(problem);
#ifdef ONNX_ATTN_WITH_CUDA
  if (like.is_cuda()) return run_cuda(problem, like);
#endif
  refuse_device(like);
}

void run(const Scatter& scatter, const Tensor& like) {
  if (plan_record::is_recording()) return;
  if (like.is_cpu()) return cpu::tensor_scatter(scatter, parallel_for);
#ifdef ONNX_ATTN_WITH_CUDA
  if (like.is_cuda()) return check_launch(cuda::tensor_scatter(scatter, current_stream(like)), "tensor_scatter");
#endif
  refuse_device(like);
}

void run(const ValidLength& problem, const Tensor& like) {
  if (plan_record::is_recording()) return;
  if (like.is_cpu()) return cpu::valid_kv_length(problem, parallel_for);
#ifdef ONNX_ATTN_WITH_CUDA
  if (like.is_cuda()) return check_launch(cuda::valid_kv_length(problem, current_stream(like)), "valid_kv_length");
#endif
  refuse_device(like);
}

namespace {

// [CUDA state: 0 not built, 1 built but this torch has none, 2 usable; then the architectures that were compiled].
std::vector<int64_t> build_info() {
#ifdef ONNX_ATTN_WITH_CUDA
  return {aoti_torch_get_current_cuda_stream ? 2 : 1, ONNX_ATTN_CUDA_ARCHITECTURES};
#else
  return {0};
#endif
}

// Character codes of a preference's text (strings leak in the stable ABI of torch 2.11); [] goes back to the environment's.
void prefer_kernels(std::vector<int64_t> text) {
  if (text.empty()) return set_thread_preference(nullptr);
  Preference preference;
  const std::string error = parse_preference(std::string(text.begin(), text.end()), preference);
  ONNX_ATTN_CHECK(error.empty(), "kernel: ", error);
  set_thread_preference(&preference);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(onnx_attn, CompositeExplicitAutograd, m) {
  m.impl("_build_info", TORCH_BOX(&build_info));
  m.impl("_prefer_kernels", TORCH_BOX(&prefer_kernels));
}

}  // namespace onnx_attn
