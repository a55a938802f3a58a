// decode_result.cuh: softmax results over part of a row's keys: how they add up, and how the sum becomes an output.
#pragma once

#include "base_2.cuh"
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

// Results of chunks, or of several that follow each other, where the first of them belongs: indexed by row of [batch, q_heads, q_len],
// then by chunk. Other multiprocessors have stored what is read: not from the L1 cache.
struct Partials {
  float4* outputs = nullptr;  // [rows, chunks, v_head_size / 4]
  float2* stats = nullptr;    // [rows, chunks]: max and sum

  __device__ __forceinline__ void store(int64_t index, const Partial& part, int quads, int column) const {
    outputs[index * quads + column / 4] = part.output;
    if (column == 0) stats[index] = make_float2(part.max, part.sum);
  }

  // Adds up to eight, `step` chunks apart, of those `count` from `first` on; between the first and number `next` there are none.
  __device__ __forceinline__ void add_to(Partial& result, int64_t first, int step, int count, int next, int quads, int column) const {
    float2 stat[kChunksTogether];
    float4 output[kChunksTogether];
#pragma unroll
    for (int i = 0; i < kChunksTogether; ++i) {
      const bool exists = i < count && (i == 0 || i >= next);
      const int64_t index = first + i * step;
      stat[i] = exists ? __ldcg(stats + index) : make_float2(-INFINITY, 0.0f);
      output[i] = exists ? __ldcg(outputs + index * quads + column / 4) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll
    for (int i = 0; i < kChunksTogether; ++i) result.add(stat[i].x, stat[i].y, output[i]);
  }

  // Adds up what several blocks have stored of the line of `unit`, whose first chunk has `first_part`, in the order in which one would.
  // A block adds up the eights that begin in its run: those from the start of the line become one part, the others one each. Chunks
  // of an eight that began before are parts of their own.
  __device__ __forceinline__ Partial line_sum(const Unit& unit, int64_t first_part, int quads, int column) const {
    Partial row;
    const int chunks = unit.entry_chunks, whole = unit.first_cut / kChunksTogether * kChunksTogether;
    if (whole > 0) add_to(row, first_part, 1, 1, 0, quads, column);
    if (unit.first_cut == whole && unit.cut_step % kChunksTogether == 0) {
      for (int first = whole; first < chunks; first += kChunksTogether * kChunksTogether) {
        const int eights = (chunks - first + kChunksTogether - 1) / kChunksTogether;
        add_to(row, first_part + first, kChunksTogether, eights, 0, quads, column);
      }
      return row;
    }
    int cut = unit.first_cut;
    for (int first = whole; first < chunks; first += kChunksTogether) {
      while (cut <= first) cut += unit.cut_step;
      Partial eight;
      add_to(eight, first_part + first, 1, chunks - first, cut - first, quads, column);
      row.add(eight);
    }
    return row;
  }
};

// A row's chunks as one block adds them up: in eights, so that the combine kernel, which reads the eights side by side, and blocks that
// share a line come to the same bits.
template <bool kIsNeeded>
struct RowSum {
  Partial row, eight;

  // A chunk whose eight began in the same run.
  __device__ __forceinline__ void add_chunk(const Unit& unit, const Partial& chunk) {
    if (unit.ordinal == 0) row = Partial();
    if (unit.ordinal == unit.first_of_eight()) eight = Partial();
    eight.add(chunk);
    if (ends_eight(unit)) row.add(eight);
  }
  __device__ __forceinline__ static bool ends_eight(const Unit& unit) {
    return unit.ordinal + 1 == min(unit.first_of_eight() + kChunksTogether, unit.entry_chunks);
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
  if (problem.lse && column == 0) problem.lse[row] = result.sum == 0.0f ? -INFINITY : (result.max + log2f(result.sum)) * device::kLn2;
}

}  // namespace onnx_attn::decode
