// scores_launch.cuh: what the scores kernel is told, its grid, and which type runs.
#pragma once

#include <algorithm>

#include "../launch.h"
#include "plan_mask_tile.h"
#include "scores.cuh"
#include "shared_memory_limit.h"

namespace onnx_attn::scores_kernel {

namespace {

ScoresParams make_params(const Problem& problem) {
  ScoresParams params;
  params.problem = problem;
  const Mask& mask = problem.mask;
  params.mask_tile = device::plan_natural_mask_tile(problem);
  params.depth_chunks = static_cast<int>(depth_chunks(problem));
  params.scale = static_cast<float>(problem.scale);
  params.softcap = static_cast<float>(problem.softcap);
  params.adds_causal_bias = problem.score_mode == ScoreMode::mha_logits && mask.right >= 0;

  // Long spans read Q less often; short ones fill the machine and its last wave.
  constexpr int64_t kLongSpan = 16, kEnoughBlocks = 2048;
  const int block_rows = rows(problem.dtype);
  const int64_t tiles = (problem.kv_len + kKeys - 1) / kKeys;
  params.row_blocks = (problem.q_len + block_rows - 1) / block_rows;
  const int64_t blocks = problem.batch * problem.q_heads * params.row_blocks;
  params.span_tiles = static_cast<int>(std::clamp<int64_t>(blocks * tiles / kEnoughBlocks, 1, kLongSpan));
  params.spans = (tiles + params.span_tiles - 1) / params.span_tiles;
  return params;
}

template <class Shape>
cudaError_t launch(const ScoresParams& params, const Device& device, cudaStream_t stream) {
  static_assert(sizeof(SharedMemory<Shape>) <= fixed_bytes(Shape::kType), "scores_refusal knows the size");
  const int64_t blocks = params.problem.batch * params.problem.q_heads * params.row_blocks * params.spans;
  const int bytes = static_cast<int>(sizeof(SharedMemory<Shape>) + query_bytes(params.problem)) +
                    device::MaskTile<Shape::kRows, kKeys>::bytes(params.mask_tile);
  const cudaError_t error = allow_shared_memory<write_scores<Shape>>(static_cast<int>(device.max_shared_memory));
  if (error != cudaSuccess) return error;
  write_scores<Shape><<<static_cast<unsigned>(blocks), kThreads, bytes, stream>>>(params);
  return cudaGetLastError();
}

template <bool kUsesWarpgroups>
cudaError_t run(const Problem& problem, const Device& device, void* workspace, cudaStream_t stream) {
  ScoresParams params = make_params(problem);
  if (params.problem.batch * params.problem.q_heads * params.row_blocks * params.spans == 0) return cudaSuccess;
  if (problem.dtype == DType::f16) return launch<Shape<__half, kUsesWarpgroups>>(params, device, stream);
  if (problem.dtype == DType::bf16) return launch<Shape<__nv_bfloat16, kUsesWarpgroups>>(params, device, stream);
  if (problem.dtype != DType::f32) return cudaErrorInvalidValue;  // scores_refusal was not asked
  Problem read = problem;
  // The first two modes show the product with whatever lies past the length.
  if (problem.score_mode == ScoreMode::raw || problem.score_mode == ScoreMode::capped) read.mask.lengths = Lengths{};
  params.split_k = split::split_tensor(problem, problem.head_size, workspace);
  const cudaError_t error = split::split_keys(read, params.split_k, stream);
  return error == cudaSuccess ? launch<Shape<float, kUsesWarpgroups>>(params, device, stream) : error;
}

}  // namespace

}  // namespace onnx_attn::scores_kernel
