// forward_sm80_params.h: what the portable tensor-core forward kernel is told, and its launchers.
#pragma once

#include <cuda_runtime.h>

#include "../device/masking.cuh"
#include "../device/work.cuh"

namespace onnx_attn::forward_sm80_kernel {

// What happens to a product of Q and K before it is masked. Weights are 2^(score * unit - ...): a score that nothing is
// added to stays as it is and the unit carries the scale; otherwise scores are brought to base-2 units and the unit is 1.
enum class ScoreForm : int8_t { raw, scaled, capped };

struct ForwardParams {
  Problem problem;
  device::WorkOrder order;
  device::MaskTilePlan mask_tile;
  ScoreForm form = ScoreForm::raw;
  float unit = 1;      // > 0
  float scale = 1;     // scaled: score *= scale
  float cap_in = 0;    // capped: score = cap * (1 - 2 / (1 + 2^(score * cap_in))), which is cap * tanh(score * cap_in * ln(2) / 2)
  float cap = 0;
};

template <class Element, int kHeadSize>
cudaError_t launch(const ForwardParams& params, cudaStream_t stream);

}  // namespace onnx_attn::forward_sm80_kernel
