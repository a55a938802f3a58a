// run.cpp: the step from a checked Problem to kernels: device, stream, plan, launch.
#include <vector>

#include "plan_record.h"
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

void parallel_for(int64_t count, const std::function<void(int64_t, int64_t)>& body) {
  torch::stable::parallel_for(0, count, 1, body);
}

// What attention sees once its new rows are stored, biases included.
void mark_appended(Problem& problem) {
  problem.append.active = false;
  problem.k_bias = problem.v_bias = nullptr;
}

void run_cpu(Problem& problem) {
  const Plan plan = make_plan(problem, Device{});
  if (plan.separate_append) {
    cpu::append(problem, parallel_for);
    mark_appended(problem);
  }
  if (plan.kernel == Kernel::cpu) cpu::attention(problem, parallel_for);
}

#ifdef ONNX_ATTN_WITH_CUDA

void* current_stream(const Tensor& like) {
  ONNX_ATTN_CHECK(aoti_torch_get_current_cuda_stream, "onnx_attn: the loaded libtorch has no CUDA");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(like.get_device_index(), &stream));
  return stream;
}

void check_launch(int error, const char* what) {
  ONNX_ATTN_CHECK(error == 0, "onnx_attn: ", what, " failed: ", cuda::error_text(error));
}

Device device_of(const Tensor& like) {
  Device device;
  check_launch(cuda::query_device(like.get_device_index(), &device), "device query");
  return device;
}

void run_cuda(Problem& problem, const Tensor& like) {
  const Plan plan = make_plan(problem, device_of(like));
  void* stream = current_stream(like);
  if (plan.separate_append) {
    check_launch(cuda::append(problem, stream), "append");
    mark_appended(problem);
  }
  if (plan.kernel == Kernel::general) check_launch(cuda::general(problem, plan, stream), "general attention kernel");
}

#endif

Device own_device(const Tensor& like) {
#ifdef ONNX_ATTN_WITH_CUDA
  if (like.is_cuda()) return device_of(like);
#endif
  return Device{};
}

}  // namespace

void run(Problem& problem, const Tensor& like) {
  if (plan_record::is_recording()) {
    const Device* pretended = plan_record::pretended_device();
    return plan_record::store(make_plan(problem, pretended ? *pretended : own_device(like)));
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

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(onnx_attn, CompositeExplicitAutograd, m) { m.impl("_build_info", TORCH_BOX(&build_info)); }

}  // namespace onnx_attn
