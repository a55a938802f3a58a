// plan.h: which kernel runs a Problem, with what split and workspace. A pure function, so that it can be tested without a GPU.
#pragma once

#include <cstdint>

#include "problem.h"

namespace onnx_attn {

// What the planner needs to know of the machine.
struct Device {
  bool is_cuda = false;
  int capability = 0;            // 90 for compute capability 9.0
  int sm_count = 0;
  int64_t max_shared_memory = 0; // bytes that one block may ask for
};

enum class Kernel : int8_t {
  nothing,  // an empty output: only an append may have to run
  cpu,      // the blocked CPU kernel
  general,  // the CUDA kernel that takes every feature, type, size and stride
};

struct Plan {
  Kernel kernel = Kernel::nothing;
  bool separate_append = false;  // rows are appended by a kernel of their own before attention starts
  int64_t workspace_bytes = 0;
};

Plan make_plan(const Problem& problem, const Device& device);

const char* kernel_name(Kernel kernel);

}  // namespace onnx_attn
