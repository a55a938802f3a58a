// decode_result.cuh: softmax results over part of a row's keys: how they add up, and how the sum becomes an output.
#pragma once

#include "decode_work.cuh"
#include "ptx_decode.cuh"

namespace onnx_attn::decode {

// Four columns of the output of one row over some of its keys: weights are 2^(score - max), and neither the output nor
// `sum`, the sum of the weights, is divided by anything yet. Without any key: max = -inf, zeros.
struct Partial {
  float max = -INFINITY;
  float sum = 0.0f;
  float4 output = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

  // Joins kCount more partial results, in order.
  template <int kCount>
  __device__ __forceinline__ void add(const float2 (&stats)[kCount], const float4 (&outputs)[kCount]) {
    float new_max = max;
#pragma unroll
    for (int i = 0; i < kCount; ++i) new_max = fmaxf(new_max, stats[i].x);
    const float reference = new_max == -INFINITY ? 0.0f : new_max;
    scale(device::exp2_fast(max - reference));
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float weight = device::exp2_fast(stats[i].x - reference);
      sum = fmaf(weight, stats[i].y, sum);
      output.x = fmaf(weight, outputs[i].x, output.x);
      output.y = fmaf(weight, outputs[i].y, output.y);
      output.z = fmaf(weight, outputs[i].z, output.z);
      output.w = fmaf(weight, outputs[i].w, output.w);
    }
    max = new_max;
  }

  __device__ __forceinline__ void scale(float factor) {
    sum *= factor;
    output.x *= factor;
    output.y *= factor;
    output.z *= factor;
    output.w *= factor;
  }
};

// What the decode kernel leaves for the combine kernel: results indexed by row of [batch, q_heads, q_len], then by chunk.
struct Partials {
  float4* outputs = nullptr;  // [rows, chunks, v_head_size / 4]
  float2* stats = nullptr;    // [rows, chunks]: max and sum
};

// Where the output of row `row` of [batch, q_heads, q_len] begins.
template <class Element>
__device__ __forceinline__ Element* output_row(const Problem& problem, int row) {
  const int q_len = static_cast<int>(problem.q_len), q_heads = static_cast<int>(problem.q_heads);
  const int query = row % q_len, head = row / q_len % q_heads, batch = row / q_len / q_heads;
  return static_cast<Element*>(problem.y.data) + batch * problem.y.batch_stride + head * problem.y.head_stride +
         query * problem.y.row_stride;
}

// Stores columns [column, column + 4) of a row. A row without a key is exactly zero.
template <class Element>
__device__ __forceinline__ void store_result(const Problem& problem, Element* y, int row, int column, const float4& output, float max,
                                             float sum) {
  const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
  *reinterpret_cast<uint2*>(y + column) =
      make_uint2(device::pack<Element>(output.x * factor, output.y * factor), device::pack<Element>(output.z * factor, output.w * factor));
  constexpr float kLn2 = 0.6931471805599453f;
  if (problem.lse && column == 0) problem.lse[row] = sum == 0.0f ? -INFINITY : (max + log2f(sum)) * kLn2;
}

}  // namespace onnx_attn::decode
