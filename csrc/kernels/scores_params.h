// scores_params.h: what the scores kernel is told.
#pragma once

#include "../device/masking.cuh"
#include "scores_sizes.h"
#include "split_rows.h"

namespace onnx_attn::scores_kernel {

struct ScoresParams {
  Problem problem;
  device::MaskTilePlan mask_tile;  // in natural units, like every score here
  split::SplitTensor split_k;      // float32 only
  int64_t row_blocks = 0;          // of one head
  int64_t spans = 0;               // of the keys of one row block; each is a thread block's work
  int span_tiles = 0;
  int depth_chunks = 0;  // of kDepth columns
  float scale = 1;
  float softcap = 0;
  bool adds_causal_bias = false;  // mha_logits: causality adds the lowest float32 and excludes nothing
};

}  // namespace onnx_attn::scores_kernel
