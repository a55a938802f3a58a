// forward_sm90_params.h: what the Hopper forward kernel is told, and its launchers.
#pragma once

#include <cuda.h>  // for types; the driver is not linked
#include <cuda_runtime.h>

#include "../device/work.cuh"
#include "../problem.h"
#include "forward_sm90_limits.h"

namespace onnx_attn::forward_sm90_kernel {

// What happens to a product of Q and K before it is masked. Weights are 2^(score * unit - ...): raw scores stay as they are and
// the unit carries the scale; the others are brought to natural units.
enum class ScoreForm : int8_t { raw, capped, scaled };

struct ScoreTransform {
  ScoreForm form = ScoreForm::raw;
  float unit = 1;   // > 0
  float scale = 1;  // scaled: score *= scale
  // capped: score = cap * tanh(score * scale / softcap), which is cap - 2 * cap / (1 + 2^(score * exponent)), and to 3e-6 the
  // polynomial with coefficients `odd` of the 1st, 3rd, 5th and 7th power where |score| <= small.
  float cap = 0, exponent = 0;
  float odd[4] = {}, small = 0;
  float filter = 0;  // of padding, in scores
};

// How a tensor mask reaches the scores.
enum class MaskAccess : int8_t {
  none,
  tiles,     // by bulk copies through shared memory
  elements,  // from global memory, one element at a time
};

struct MaskTiles {
  MaskAccess access = MaskAccess::none;
  int8_t element_bytes = 1;
  bool is_key_row = false;  // the same for all queries: a tile is one row
  bool by_head = false;     // the mask has a head axis ...
  bool by_batch = false;    // ... and a batch axis
};

// A tile of a tensor mask in shared memory: panels whose rows have up to 128 bytes, swizzled by the bulk copies. Four tiles of bytes
// take as much room as two of 16-bit elements, or one of floats.
struct MaskLayout {
  int rows, keys, element_bytes;

  ONNX_ATTN_HOST_DEVICE constexpr int row_bytes() const { return keys * element_bytes < 128 ? keys * element_bytes : 128; }
  ONNX_ATTN_HOST_DEVICE constexpr int panel_keys() const { return row_bytes() >> element_bytes / 2; }
  ONNX_ATTN_HOST_DEVICE constexpr int panels() const { return (keys * element_bytes + 127) / 128; }
  ONNX_ATTN_HOST_DEVICE constexpr int panel_bytes() const { return rows * row_bytes(); }
  ONNX_ATTN_HOST_DEVICE constexpr int tile_bytes() const { return panels() * panel_bytes(); }
  ONNX_ATTN_HOST_DEVICE constexpr int stage_bits() const { return 2 - element_bytes / 2; }  // room for 2^stage_bits tiles
  ONNX_ATTN_HOST_DEVICE constexpr int swizzle(int row) const { return row_bytes() == 128 ? row % 8 : row / 2 % 4; }  // of 16-byte chunks
};

struct TensorMaps {  // axes column, row, head, batch; boxes of 64 columns
  CUtensorMap q, k, v, y, mask;
};

// Scores leave as they are before the softmax, which is what each mode that this kernel writes asks for.
struct ScoreOutput {
  CUtensorMap map;  // boxes of a panel's 64 columns by a warp's 16 rows
  float scale = 1;  // from the scores of the loop to those of the operator
};

struct ForwardParams {
  TensorMaps maps;
  Problem problem;
  ScoreTransform transform;
  MaskTiles mask;
  device::WorkOrder order;
  bool is_batch_first = false;  // heads are numbered so that the batch entries of a query head are neighbours
  int blocks = 0;               // of query rows, in all heads
  int* next_block = nullptr;    // how many blocks beyond the first of each thread block were drawn; null: they are dealt in turn
  ScoreOutput score_output;     // of kernels that write scores
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
template <class Element, int kSize>
cudaError_t launch_with_scores(const ForwardParams& params, const LaunchSite& site);
template <class Element, int kHeadSize>
cudaError_t launch_score_pass(const ForwardParams& params, const LaunchSite& site);

// Rows and keys of a tile.
struct TileSize {
  int rows, keys;
};

// False where a tensor has strides that forward_sm90_refusal would have refused.
bool make_tensor_maps(ForwardParams& params, const TileSize& tile);
bool make_product_maps(ForwardParams& params, const TileSize& tile);  // Q and K alone
bool make_score_map(ForwardParams& params);

// By head size.
cudaError_t launch_any(const Problem& problem, const LaunchSite& site);
cudaError_t launch_any_score_pass(const Problem& problem, const LaunchSite& site);

}  // namespace onnx_attn::forward_sm90_kernel
