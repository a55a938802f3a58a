// plan_mask_tile.h: how the tensor mask and the padding of a Problem reach the scores of the kernels that stage mask tiles. Host.
#pragma once

#include <algorithm>

#include "../device/masking.cuh"

namespace onnx_attn::device {

inline bool can_copy_rows(const TensorMask& mask, int element_bytes, const Problem& problem) {
  const auto aligned = [&](int64_t extent, int64_t stride) { return extent <= 1 || stride * element_bytes % 16 == 0; };
  return mask.key_stride == 1 && reinterpret_cast<uintptr_t>(mask.data) % 16 == 0 && aligned(problem.batch, mask.batch_stride) &&
         aligned(problem.q_heads, mask.head_stride) && aligned(problem.q_len, mask.query_stride);
}

inline MaskTileFormat format_of(const TensorMask& mask) {
  if (mask.kind == TensorMask::Kind::none) return MaskTileFormat::none;
  if (mask.kind == TensorMask::Kind::keep) return MaskTileFormat::keep;
  return mask.dtype == DType::f16 ? MaskTileFormat::f16 : mask.dtype == DType::bf16 ? MaskTileFormat::bf16 : MaskTileFormat::f32;
}

inline MaskTilePlan plan_mask_tile(const Problem& problem, float bias_unit) {
  const TensorMask& tensor = problem.mask.tensor;
  const Padding& padding = problem.mask.padding;
  MaskTilePlan plan;
  plan.bias_unit = bias_unit;
  if (padding.kind != Padding::Kind::none) {
    plan.joined_padding = padding.kind == Padding::Kind::keep && padding.query_stride != 0 && problem.q_len > 1;
    plan.key_padding = !plan.joined_padding;
    plan.key_padding_filter = std::max(padding.filter * bias_unit, bias_floor(padding.filter));
  }
  plan.one_row = !plan.joined_padding && (tensor.query_stride == 0 || problem.q_len == 1);
  plan.format = plan.joined_padding ? MaskTileFormat::f32 : format_of(tensor);
  if (plan.format == MaskTileFormat::none || plan.joined_padding) return plan;
  plan.by_chunks = tensor.dtype != DType::f64 && can_copy_rows(tensor, element_bytes(plan.format), problem);
  if (!plan.by_chunks && plan.format != MaskTileFormat::keep) plan.format = MaskTileFormat::f32;
  return plan;
}

// For kernels whose scores are what the operator calls scores.
inline MaskTilePlan plan_natural_mask_tile(const Problem& problem) {
  MaskTilePlan plan = plan_mask_tile(problem, 1.0f);
  plan.key_padding_filter = problem.mask.padding.filter;
  return plan;
}

}  // namespace onnx_attn::device
