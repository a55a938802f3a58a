// forward_sm80_params.h: what the portable tensor-core forward kernel is told, and its launchers.
#pragma once

#include <cuda_runtime.h>

#include "../device/masking.cuh"
#include "../device/work.cuh"

namespace onnx_attn::forward_sm80_kernel {

// What happens to a product of Q and K before it is masked. Weights are 2^(score * unit - ...): where nothing speaks against
// it the unit carries the scale and the score stays raw; otherwise the score is brought to base 2 and the unit is 1.
enum class ScoreForm : int8_t { raw, scaled, capped };

struct ScoreTransform {
  ScoreForm form = ScoreForm::raw;
  float scale = 1;   // scaled: score *= scale
  float cap_in = 0;  // capped: score = cap - 2 * cap / (1 + 2^(score * cap_in)), which is cap * tanh(score * cap_in * ln(2) / 2)
  float cap = 0;
};

struct ForwardParams {
  Problem problem;
  device::WorkOrder order;
  device::MaskTilePlan mask_tile;
  ScoreTransform transform;
  float unit = 1;  // > 0
};

template <class Element, int kHeadSize>
cudaError_t launch(const ForwardParams& params, cudaStream_t stream);

}  // namespace onnx_attn::forward_sm80_kernel
