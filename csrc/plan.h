// plan.h: which kernel runs a Problem, with what workspace. A pure function, so that it can be tested without a GPU.
#pragma once

#include <cstdint>

#include "problem.h"

namespace onnx_attn {

// What the planner needs to know of the machine.
struct Device {
  bool is_cuda = false;
  int capability = 0;  // 90 for compute capability 9.0
  int sm_count = 0;
  int64_t max_shared_memory = 0;  // bytes that one block may ask for
};

enum class Kernel : int8_t {
  nothing,          // an empty output: only an append may have to run
  cpu,              // the blocked CPU kernel
  decode,           // CUDA, few query rows: keys split over blocks, memory bound
  forward_short,    // CUDA, Hopper's instructions for heads that fit into shared memory
  forward_sm90,     // CUDA, Hopper's own tensor-core and copy instructions
  forward_sm80,     // CUDA, tensor cores of compute capability 8.0 and later
  forward_float32,  // CUDA, the same for float32
  general,          // CUDA, every feature, type, size and stride
};
inline constexpr int kKernels = 8;

// A caller's wish. CUDA kernels only: the CPU has one.
struct Preference {
  static constexpr int kNone = -1;
  int forced = kNone;      // a Kernel
  uint32_t forbidden = 0;  // bit k: Kernel k may not be chosen
};

struct Plan {
  Kernel kernel = Kernel::nothing;
  bool separate_append = false;  // past or new rows are stored by a kernel of their own before attention starts
  bool separate_bias = false;    // biased K and V are stored in the workspace first
  bool separate_scores = false;  // the scores output is written by a kernel of its own once attention has run
  int64_t workspace_bytes = 0;
  const char* refusals[kKernels] = {};  // why a faster kernel was not chosen; null: not considered, or chosen
  const char* error = nullptr;          // the preference cannot be followed
};

Plan make_plan(const Problem& problem, const Device& device, const Preference& preference = {});

// The problem as attention sees it: the appends and biases that `plan` runs separately are stored, the scores that it writes
// separately are none of its business.
Problem after_separate_steps(const Problem& problem, const Plan& plan, void* workspace);

// What is left of the problem for the scores kernel, when plan.separate_scores, once attention has run on `attended`.
Problem scores_problem(const Problem& problem, const Problem& attended);

int64_t separate_bytes(const Problem& problem, const Plan& plan);  // of workspace, before that of the kernels

const char* kernel_name(Kernel kernel);
int kernel_named(const char* name);  // a Kernel, or -1

}  // namespace onnx_attn
