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

  // Joins kCount partial results into one.
  template <int kCount>
  __device__ __forceinline__ static Partial sum_of(const float2 (&stats)[kCount], const float4 (&outputs)[kCount]) {
    Partial result;
#pragma unroll
    for (int i = 0; i < kCount; ++i) result.max = fmaxf(result.max, stats[i].x);
#pragma unroll
    for (int i = 0; i < kCount; ++i) result.accumulate(weight_of(stats[i].x, result.max), stats[i].y, outputs[i]);
    return result;
  }

  // Joins one more. Results of chunks add up one after the other, so that it does not matter which block adds them.
  __device__ __forceinline__ void add(float other_max, float other_sum, const float4& other) {
    const float old_max = max;
    max = fmaxf(max, other_max);
    scale(weight_of(old_max, max));
    accumulate(weight_of(other_max, max), other_sum, other);
  }
  __device__ __forceinline__ void add(const Partial& other) { add(other.max, other.sum, other.output); }

 private:
  static __device__ __forceinline__ float weight_of(float part_max, float common_max) {
    return device::exp2_fast(part_max - (common_max == -INFINITY ? 0.0f : common_max));
  }
  __device__ __forceinline__ void accumulate(float weight, float other_sum, const float4& other) {
    sum = fmaf(weight, other_sum, sum);
    output.x = fmaf(weight, other.x, output.x);
    output.y = fmaf(weight, other.y, output.y);
    output.z = fmaf(weight, other.z, output.z);
    output.w = fmaf(weight, other.w, output.w);
  }
  __device__ __forceinline__ void scale(float factor) {
    sum *= factor;
    output.x *= factor;
    output.y *= factor;
    output.z *= factor;
    output.w *= factor;
  }
};

// Results of chunks, indexed by row of [batch, q_heads, q_len], then by chunk; or of runs of eight, by run.
struct Partials {
  float4* outputs = nullptr;  // [rows, chunks, v_head_size / 4]
  float2* stats = nullptr;    // [rows, chunks]: max and sum

  // Adds eight of them from `first` on, or `count` if that is less. Other multiprocessors have stored them: not from the L1 cache.
  __device__ __forceinline__ void add_to(Partial& result, int64_t first, int count, int quads, int column) const {
    float2 stat[kChunksTogether];
    float4 output[kChunksTogether];
#pragma unroll
    for (int i = 0; i < kChunksTogether; ++i) {
      stat[i] = i < count ? __ldcg(stats + first + i) : make_float2(-INFINITY, 0.0f);
      output[i] = i < count ? __ldcg(outputs + (first + i) * quads + column / 4) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll
    for (int i = 0; i < kChunksTogether; ++i) result.add(stat[i].x, stat[i].y, output[i]);
  }
};

// The result of a row is that of its chunks added up in eights, and then the eights. The combine kernel can read the eights side by
// side, and a block that has all chunks of an eight, or of a row, comes to the same bits.
template <bool kIsNeeded>
struct RowSum {
  Partial row, eight;

  // Chunk `ordinal` of a line, of which chunks `first` on are added up here: from a multiple of eight.
  __device__ __forceinline__ void add_chunk(int ordinal, int first, const Partial& chunk) {
    if (ordinal == first) row = eight = Partial();
    eight.add(chunk);
    if (ordinal % kChunksTogether == kChunksTogether - 1) add_eight();
  }
  // After the chunk `ordinal`.
  __device__ __forceinline__ const Partial& finish(int ordinal) {
    if (ordinal % kChunksTogether != kChunksTogether - 1) add_eight();
    return row;
  }

 private:
  __device__ __forceinline__ void add_eight() {
    row.add(eight);
    eight = Partial();
  }
};
template <>
struct RowSum<false> {};

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
__device__ __forceinline__ void store_result(const Problem& problem, Element* y, int row, int column, const Partial& result) {
  const float4& output = result.output;
  const float factor = result.sum == 0.0f ? 0.0f : 1.0f / result.sum;
  *reinterpret_cast<uint2*>(y + column) =
      make_uint2(device::pack<Element>(output.x * factor, output.y * factor), device::pack<Element>(output.z * factor, output.w * factor));
  constexpr float kLn2 = 0.6931471805599453f;
  if (problem.lse && column == 0) problem.lse[row] = result.sum == 0.0f ? -INFINITY : (result.max + log2f(result.sum)) * kLn2;
}

}  // namespace onnx_attn::decode
