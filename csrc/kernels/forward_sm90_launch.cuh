// forward_sm90_launch.cuh: maps, grid and shared memory of the Hopper forward kernel, and the choice by what a call does to scores.
#pragma once

#include <algorithm>

#include "forward_sm90.cuh"
#include "shared_memory_limit.h"

namespace onnx_attn::forward_sm90_kernel {

template <class Element, class Shape, ScoreWork kScoreWork>
cudaError_t launch_shape(ForwardParams params, const LaunchSite& site) {
  static_assert(sizeof(SharedMemory<Shape>) <= kHopperSharedBytes);
  params.order = order_work(params.problem, Shape::kRows);
  params.order.band = site.tuning.band;
  params.is_batch_first = site.tuning.is_batch_first;
  params.blocks = static_cast<int>(params.order.heads * params.order.row_blocks);
  if (!make_tensor_maps(params, TileSize{Shape::kRows, Shape::kKeys})) return cudaErrorInvalidValue;
  if (Shape::kWritesScores && !make_score_map(params)) return cudaErrorInvalidValue;

  constexpr auto kKernel = forward<Element, Shape, kScoreWork>;
  cudaError_t error = allow_shared_memory<kKernel>(sizeof(SharedMemory<Shape>));
  if (error != cudaSuccess) return error;
  const int grid = site.tuning.dealing == Dealing::one_each ? params.blocks : std::min(params.blocks, site.sm_count);
  if (site.tuning.dealing == Dealing::drawn && grid < params.blocks) {
    params.next_block = site.counter;
    error = cudaMemsetAsync(site.counter, 0, sizeof(int), site.stream);
    if (error != cudaSuccess) return error;
  }
  kKernel<<<grid, Shape::kThreads, sizeof(SharedMemory<Shape>), site.stream>>>(params);
  return cudaGetLastError();
}

// The least that does what the call asks of its scores.
inline ScoreWork score_work(const ForwardParams& params) {
  const TensorMask& mask = params.problem.mask.tensor;
  const Padding::Kind padding = params.problem.mask.padding.kind;
  const ScoreForm form = params.transform.form;
  const bool has_tiles = params.mask.access == MaskAccess::tiles;
  if (mask.kind == TensorMask::Kind::none && padding == Padding::Kind::none && form != ScoreForm::scaled) {
    return form == ScoreForm::capped ? ScoreWork::cap : ScoreWork::none;
  }
  if (mask.kind == TensorMask::Kind::bias && has_tiles && mask.dtype == params.problem.dtype && padding == Padding::Kind::none &&
      form == ScoreForm::scaled) {
    return ScoreWork::bias;
  }
  const bool keeps = mask.kind == TensorMask::Kind::none || (mask.kind == TensorMask::Kind::keep && has_tiles);
  return keeps && padding != Padding::Kind::keep && form == ScoreForm::raw ? ScoreWork::keep : ScoreWork::masks;
}

// Problems that ask for a small tile do everything with MaskShape.
template <class Element, class LargeShape, class PlainShape, class KeepShape, class BiasShape, class MaskShape>
cudaError_t launch_by_work(const ForwardParams& params, const LaunchSite& site) {
  const ScoreWork work = score_work(params);
  const bool is_small = KeepShape::kRows > MaskShape::kRows && !site.tuning.large_tile;
  if (has_mask(work) && is_small) {
    return work == ScoreWork::keep ? launch_shape<Element, MaskShape, ScoreWork::keep>(params, site)
                                   : launch_shape<Element, MaskShape, ScoreWork::masks>(params, site);
  }
  switch (work) {
    case ScoreWork::cap: return launch_shape<Element, PlainShape, ScoreWork::cap>(params, site);
    case ScoreWork::keep: return launch_shape<Element, KeepShape, ScoreWork::keep>(params, site);
    case ScoreWork::bias: return launch_shape<Element, BiasShape, ScoreWork::bias>(params, site);
    case ScoreWork::masks: return launch_shape<Element, MaskShape, ScoreWork::masks>(params, site);
    default: break;
  }
  return site.tuning.large_tile ? launch_shape<Element, LargeShape, ScoreWork::none>(params, site)
                                : launch_shape<Element, PlainShape, ScoreWork::none>(params, site);
}

// Calls that forward_sm90_refusal lets through have no mask.
template <class Element, class LargeShape, class PlainShape>
cudaError_t launch_with_scores_by_work(const ForwardParams& params, const LaunchSite& site) {
  switch (score_work(params)) {
    case ScoreWork::none:
      return site.tuning.large_tile ? launch_shape<Element, LargeShape, ScoreWork::none>(params, site)
                                    : launch_shape<Element, PlainShape, ScoreWork::none>(params, site);
    case ScoreWork::cap: return launch_shape<Element, PlainShape, ScoreWork::cap>(params, site);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace onnx_attn::forward_sm90_kernel
