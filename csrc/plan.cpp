// plan.cpp: every choice between kernels, with its reason.
#include "plan.h"

#include <algorithm>
#include <cstring>

#include "launch.h"

namespace onnx_attn {

namespace {

constexpr const char* kNames[kKernels] = {"nothing",      "cpu",          "decode",          "forward_short",
                                          "forward_sm90", "forward_sm80", "forward_float32", "general"};

// CUDA kernels, fastest first for the calls that they take. Forward kernels multiply tiles of 16 query rows and more: below that decode's
// packing of grouped heads wastes less, and its split over keys fills the machine.
constexpr Kernel kCandidates[] = {Kernel::decode,       Kernel::forward_short,   Kernel::forward_sm90,
                                  Kernel::forward_sm80, Kernel::forward_float32, Kernel::general};

int64_t align(int64_t bytes) { return (bytes + 255) / 256 * 256; }

int64_t biased_key_bytes(const Problem& problem) {
  return align(problem.batch * problem.kv_heads * problem.kv_len * problem.head_size * float_bytes(problem.dtype));
}

int64_t biased_value_bytes(const Problem& problem) {
  return align(problem.batch * problem.kv_heads * problem.kv_len * problem.v_head_size * float_bytes(problem.v_dtype));
}

int64_t biased_bytes(const Problem& problem) { return biased_key_bytes(problem) + biased_value_bytes(problem); }

// Softmax weights are made from the log-sum-exp of attention, which a caller who wants scores has not asked for.
bool needs_own_lse(const Problem& problem, const Plan& plan) {
  return plan.separate_scores && problem.score_mode == ScoreMode::weights && !problem.lse;
}

// Null where the kernel can run the problem.
const char* refusal(Kernel kernel, const Problem& problem, const Device& device) {
  switch (kernel) {
    case Kernel::decode:
      if (device.capability < 80) return "the decode kernel needs compute capability 8.0";
      return cuda::decode_refusal(problem);
    case Kernel::forward_short:
#ifdef ONNX_ATTN_WITHOUT_SM90
      return "this build has no code for compute capability 9.0a";
#endif
      if (device.capability != 90) return "the forward_short kernel needs compute capability 9.0";
      return cuda::forward_short_refusal(problem);
    case Kernel::forward_sm90:
#ifdef ONNX_ATTN_WITHOUT_SM90
      return "this build has no code for compute capability 9.0a";
#endif
      if (device.capability != 90) return "the forward_sm90 kernel needs compute capability 9.0";
      return cuda::forward_sm90_refusal(problem);
    case Kernel::forward_sm80:
      if (device.capability < 80) return "the forward_sm80 kernel needs compute capability 8.0";
      return cuda::forward_sm80_refusal(problem);
    case Kernel::forward_float32:
      if (device.capability < 80) return "the forward_float32 kernel needs compute capability 8.0";
      return cuda::forward_float32_refusal(problem, device);
    default: return nullptr;
  }
}

int64_t kernel_workspace(Kernel kernel, const Problem& problem, const Device& device) {
  if (kernel == Kernel::decode) return cuda::decode_workspace_bytes(problem, device);
  if (kernel == Kernel::forward_sm90) return cuda::forward_sm90_workspace_bytes(problem, device);
  if (kernel == Kernel::forward_float32) return cuda::forward_float32_workspace_bytes(problem);
  return 0;
}

const char* preference_refusal(const Preference& preference, int kernel) {
  if (preference.forced >= 0 && preference.forced != kernel) return "another kernel is forced";
  return preference.forbidden >> kernel & 1 ? "it is forbidden" : nullptr;
}

// An address in a workspace that does not exist yet: it is aligned, and not null.
void* planned_workspace() { return reinterpret_cast<void*>(uintptr_t{256}); }

// Makes the scores output a step of its own where the scores kernel can write it, else returns why not. The general kernel
// writes scores itself: forced, it runs the whole call, as the oracle for the others.
const char* plan_scores(Plan& plan, const Problem& problem, const Device& device, const Preference& preference) {
  if (problem.score_mode == ScoreMode::none) return nullptr;
  if (preference.forced == static_cast<int>(Kernel::general)) return "the general kernel is forced";
  const auto ask = [&] {
    return cuda::scores_refusal(scores_problem(problem, after_separate_steps(problem, plan, planned_workspace())), device);
  };
  const char* refusal = ask();
  if (refusal && problem.k_bias && !problem.append.active) {
    plan.separate_bias = true;
    refusal = ask();
    if (refusal) plan.separate_bias = false;
  }
  plan.separate_scores = !refusal;
  return refusal;
}

// The first candidate that takes the problem as it is, or takes it once rows are appended or a projection bias of K and V is stored.
void choose_cuda_kernel(Plan& plan, const Problem& problem, const Device& device, const Preference& preference) {
  const char* scores_refusal = plan_scores(plan, problem, device, preference);
  const bool can_store_bias = !plan.separate_bias && !problem.append.active && (problem.k_bias || problem.v_bias);
  const auto ask = [&](Kernel kernel) {
    if (scores_refusal && kernel != Kernel::general) return scores_refusal;
    return refusal(kernel, after_separate_steps(problem, plan, planned_workspace()), device);
  };
  for (const Kernel kernel : kCandidates) {
    const int number = static_cast<int>(kernel);
    plan.kernel = kernel;
    plan.refusals[number] = preference_refusal(preference, number);
    if (plan.refusals[number]) continue;
    if (kernel == Kernel::decode && problem.append.active) {
      plan.separate_append = false;  // it stores the rows while it reads the rest: each byte moves once
      plan.refusals[number] = ask(kernel);
      if (!plan.refusals[number]) return;
      plan.separate_append = true;
    }
    if (kernel == Kernel::forward_sm90 && problem.score_mode != ScoreMode::none) {
      const bool separate = plan.separate_scores;
      plan.separate_scores = false;  // it writes them while it makes Y: the same products, and stores beside them
      if (!refusal(kernel, after_separate_steps(problem, plan, planned_workspace()), device)) {
        plan.refusals[number] = nullptr;
        return;
      }
      plan.separate_scores = separate;
    }
    plan.refusals[number] = ask(kernel);
    if (!plan.refusals[number]) return;
    if (!can_store_bias) continue;
    plan.separate_bias = true;
    plan.refusals[number] = ask(kernel);
    if (!plan.refusals[number]) return;
    plan.separate_bias = false;
  }
  plan.kernel = Kernel::nothing;
  plan.error = preference.forced >= 0 ? plan.refusals[preference.forced] : "every kernel is forbidden";
}

}  // namespace

int64_t separate_bytes(const Problem& problem, const Plan& plan) {
  int64_t bytes = plan.separate_bias ? biased_bytes(problem) : 0;
  if (needs_own_lse(problem, plan)) bytes += align(problem.batch * problem.q_heads * problem.q_len * int64_t{sizeof(float)});
  return bytes;
}

const char* kernel_name(Kernel kernel) { return kNames[static_cast<int>(kernel)]; }

int kernel_named(const char* name) {
  for (const Kernel kernel : kCandidates) {
    if (std::strcmp(name, kernel_name(kernel)) == 0) return static_cast<int>(kernel);
  }
  return -1;
}

Problem after_separate_steps(const Problem& problem, const Plan& plan, void* workspace) {
  Problem attended = problem;
  if (plan.separate_append || plan.separate_bias) {
    attended.append.active = false;
    attended.k_bias = attended.v_bias = nullptr;
  }
  if (plan.separate_bias) {
    char* keys = static_cast<char*>(workspace);
    const auto packed = [&](char* data, int64_t columns) {
      return Tensor4{data, problem.kv_heads * problem.kv_len * columns, problem.kv_len * columns, columns};
    };
    attended.k = packed(keys, problem.head_size);
    attended.v = packed(keys + biased_key_bytes(problem), problem.v_head_size);
  }
  if (plan.separate_scores) {
    attended.score_mode = ScoreMode::none;
    attended.scores = nullptr;
  }
  if (needs_own_lse(problem, plan)) {
    attended.lse = reinterpret_cast<float*>(static_cast<char*>(workspace) + (plan.separate_bias ? biased_bytes(problem) : 0));
  }
  return attended;
}

Problem scores_problem(const Problem& problem, const Problem& attended) {
  Problem scored = attended;
  if (attended.append.active) {  // attention has stored the rows, and their bias with them
    scored.append.active = false;
    scored.k_bias = scored.v_bias = nullptr;
  }
  scored.score_mode = problem.score_mode;
  scored.scores = problem.scores;
  return scored;
}

Plan make_plan(const Problem& problem, const Device& device, const Preference& preference) {
  Plan plan;
  plan.separate_append = problem.append.active;
  const bool has_rows = problem.batch > 0 && problem.q_heads > 0 && problem.q_len > 0;
  if (!has_rows) return plan;
  if (!device.is_cuda) {
    plan.kernel = Kernel::cpu;
    return plan;
  }
  choose_cuda_kernel(plan, problem, device, preference);
  const Problem attended = after_separate_steps(problem, plan, planned_workspace());
  int64_t bytes = kernel_workspace(plan.kernel, attended, device);
  if (plan.separate_scores) bytes = std::max(bytes, cuda::scores_workspace_bytes(problem));  // one after the other
  plan.workspace_bytes = separate_bytes(problem, plan) + bytes;
  return plan;
}

}  // namespace onnx_attn
