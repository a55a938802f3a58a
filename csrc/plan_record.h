// plan_record.h: lets a caller ask what a call would do, on a machine that it describes, without running it.
#pragma once

#include "plan.h"

namespace onnx_attn::plan_record {

// The machine that this thread pretends to be while it records plans; null when it runs calls as usual.
const Device* device();

void store(const Plan& plan);

}  // namespace onnx_attn::plan_record
