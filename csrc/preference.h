// preference.h: which CUDA kernels the user forces or forbids, for the process (TORCH_ONNX_ATTN_KERNEL) and for this thread.
#pragma once

#include <string>

#include "plan.h"

namespace onnx_attn {

// "general" forces a kernel; "-decode, -forward_sm90" forbids some; "" wishes for nothing. Returns what is wrong with the text, as it
// follows the name of what was read ("kernel: " and so on), or "".
std::string parse_preference(const std::string& text, Preference& preference);

// The thread's preference if one is set, else the environment's. An environment that cannot be read has `error` set.
const Preference& current_preference(std::string& error);

void set_thread_preference(const Preference* preference);  // null: back to the environment's

}  // namespace onnx_attn
