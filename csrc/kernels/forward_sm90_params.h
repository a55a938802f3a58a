// forward_sm90_params.h: what the Hopper forward kernel is told, and its launchers.
#pragma once

#include <cuda.h>  // for types; the driver is not linked
#include <cuda_runtime.h>

#include "../device/work.cuh"
#include "../problem.h"
#include "forward_sm90_limits.h"

namespace onnx_attn::forward_sm90_kernel {

// What happens to a product of Q and K before it is masked. Weights are 2^(score * unit - ...): raw scores stay as they are and
// the unit carries the scale; the others are brought to base 2 and the unit is 1.
enum class ScoreForm : int8_t { raw, capped, scaled };

struct ScoreTransform {
  ScoreForm form = ScoreForm::raw;
  float unit = 1;   // > 0
  float scale = 1;  // scaled: score *= scale
  // capped: score = cap * tanh(score * scale / softcap), which is cap - 2 * cap / (1 + 2^(score * exponent)), and to 3e-6 the
  // polynomial with coefficients `odd` of the 1st, 3rd, 5th and 7th power where |score| <= small.
  float cap = 0, exponent = 0;
  float odd[4] = {}, small = 0;
};

// How a tensor mask is read.
enum class MaskAccess : int8_t {
  none,
  pairs,     // two neighbouring keys at a time, while the product with V runs
  elements,  // one at a time
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

// Where a launch happens and how; `counter` is device memory for drawn dealing.
struct LaunchSite {
  Tuning tuning;
  int sm_count = 0;
  int* counter = nullptr;
  cudaStream_t stream = nullptr;
};

template <class Element, int kHeadSize, int kValueSize>
cudaError_t launch(const ForwardParams& params, const LaunchSite& site);

// False where a tensor has strides that forward_sm90_refusal would have refused.
bool make_tensor_maps(TensorMaps& maps, const Problem& problem, int block_rows, int tile_keys);

cudaError_t launch_any(const Problem& problem, const LaunchSite& site);  // by head size

}  // namespace onnx_attn::forward_sm90_kernel
