// plan_record.h: lets a caller ask what a call would do, on a machine that it describes, without running it.
#pragma once

#include <string>

#include "plan.h"

namespace onnx_attn::plan_record {

// Whether this thread records plans instead of running calls.
bool is_recording();

// While it does: the machine it plans for (null: that of the tensors), and where a plan goes.
const Device* pretended_device();
void store(const Plan& plan);

std::string as_json(const Plan& plan);

}  // namespace onnx_attn::plan_record
