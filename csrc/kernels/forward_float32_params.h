// forward_float32_params.h: what the float32 forward kernel is told, and its launchers.
#pragma once

#include "../device/masking.cuh"
#include "../device/work.cuh"
#include "forward_float32_limits.h"
#include "split_rows.h"

namespace onnx_attn::forward_float32_kernel {

struct ForwardParams {
  Problem problem;
  device::WorkOrder order;
  device::MaskTilePlan mask_tile;  // in natural units, like every score here
  split::SplitTensor k, v;
  float scale = 1;
  float softcap = 0;
};

template <int kHeadSize>
cudaError_t launch(const ForwardParams& params, cudaStream_t stream);

}  // namespace onnx_attn::forward_float32_kernel
