// forward_sm90_params.h: what the Hopper forward kernel is told, and its launchers.
#pragma once

#include <cuda.h>  // for types; the driver is not linked
#include <cuda_runtime.h>

#include "../device/work.cuh"
#include "../problem.h"

namespace onnx_attn::forward_sm90_kernel {

// What happens to a product of Q and K before it is masked. Weights are 2^(score * unit - ...): raw scores stay as they are and
// the unit carries the scale; the others are brought to base 2 and the unit is 1.
enum class ScoreForm : int8_t { raw, capped, scaled };

struct ScoreTransform {
  ScoreForm form = ScoreForm::raw;
  float unit = 1;    // > 0
  float scale = 1;   // scaled: score *= scale
  float cap_in = 0;  // capped: score = cap - 2 * cap / (1 + 2^(score * cap_in)), which is cap * tanh(score * cap_in * ln(2) / 2)
  float cap = 0;
};

// How a tensor mask is read.
enum class MaskAccess : int8_t {
  none,
  pairs,     // two neighbouring keys at a time, while the product with V runs
  elements,  // any strides
};

struct TensorMaps {  // axes column, row, head, batch; boxes of 64 columns
  CUtensorMap q, k, v, y;
};

struct ForwardParams {
  TensorMaps maps;
  Problem problem;
  ScoreTransform transform;
  MaskAccess mask_access = MaskAccess::none;
  device::WorkOrder order;
  int blocks = 0;             // of query rows, in all heads
  int* next_block = nullptr;  // how many blocks beyond the first of each thread block were drawn; null: they are dealt in turn
};

template <class Element, int kHeadSize, int kValueSize>
cudaError_t launch(const ForwardParams& params, int sm_count, cudaStream_t stream);

}  // namespace onnx_attn::forward_sm90_kernel
