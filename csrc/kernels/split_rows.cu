// split_rows.cu: the kernel behind split_rows.h. Memory bound: every row is read once and written once.
#include "split_rows.h"

#include "../device/split.cuh"

namespace onnx_attn::split {

namespace {

constexpr int kThreads = 128;
constexpr int kWarpRows = 4;  // in flight at a time
constexpr int kBlockRows = kThreads / 32 * kWarpRows;
static_assert(kRowGranule % kBlockRows == 0, "the rows of a block belong to one head");

struct Source {
  Tensor4 tensor;
  DType dtype;
  const float* bias;  // [heads, columns] or null
  Lengths lengths;
  int64_t heads, rows;
  int columns;
};

template <int kPairs>
__global__ void __launch_bounds__(kThreads) split_rows(const __grid_constant__ Source source, const __grid_constant__ SplitTensor target) {
  const int64_t first = int64_t{blockIdx.x} * kBlockRows + threadIdx.x / 32 * kWarpRows;
  const int64_t head = first / target.rows % source.heads, batch = first / target.rows / source.heads, row_begin = first % target.rows;
  const int64_t end = source.lengths.at(batch, source.rows);
  const float* bias = source.bias ? source.bias + head * source.columns : nullptr;
  const Tensor4& tensor = source.tensor;
  const int64_t offset = batch * tensor.batch_stride + head * tensor.head_stride + row_begin * tensor.row_stride;
  __half* halves = const_cast<__half*>(target.halves) + first * 2 * target.columns;
  float* factors = const_cast<float*>(target.factors) + first;

  device::with_float_type(source.dtype, [&](auto type) {
    const auto* data = static_cast<const decltype(type)*>(tensor.data) + offset;
    const bool can_load_pairs = std::is_same_v<decltype(type), float> && !bias && source.columns % 2 == 0 && tensor.row_stride % 2 == 0 &&
                                reinterpret_cast<uintptr_t>(data) % sizeof(float2) == 0;
    device::split_rows<kWarpRows, kPairs>(
        [&](int row, int column) {
          if (row_begin + row >= end) return make_float2(0.0f, 0.0f);
          if (can_load_pairs && column < source.columns) {
            return *reinterpret_cast<const float2*>(reinterpret_cast<const float*>(data) + row * tensor.row_stride + column);
          }
          const auto at = [&](int column) -> float {
            if (column >= source.columns) return 0.0f;
            return device::convert<float>(data[row * tensor.row_stride + column]) + (bias ? bias[column] : 0.0f);
          };
          return make_float2(at(column), at(column + 1));
        },
        [&](int row, int column, const device::SplitPair& pair, float factor) {
          __half* parts = halves + row * 2 * target.columns + column;
          *reinterpret_cast<uint32_t*>(parts) = pair.high;
          *reinterpret_cast<uint32_t*>(parts + target.columns) = pair.low;
          if (column == 0) factors[row] = factor;
        });
  });
}

cudaError_t launch(const Source& source, int64_t batch, const SplitTensor& target, cudaStream_t stream) {
  const int64_t blocks = batch * source.heads * target.rows / kBlockRows;
  if (blocks == 0) return cudaSuccess;
  const unsigned grid = static_cast<unsigned>(blocks);
  switch (target.columns) {
    case 64: split_rows<1><<<grid, kThreads, 0, stream>>>(source, target); break;
    case 128: split_rows<2><<<grid, kThreads, 0, stream>>>(source, target); break;
    case 256: split_rows<4><<<grid, kThreads, 0, stream>>>(source, target); break;
    default: return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

const float* unstored_bias(const Problem& problem, const void* bias) {
  return problem.append.active ? nullptr : static_cast<const float*>(bias);
}

}  // namespace

SplitTensor split_tensor(const Problem& problem, int64_t columns, void* workspace) {
  char* bytes = static_cast<char*>(workspace);
  return {reinterpret_cast<const __half*>(bytes), reinterpret_cast<const float*>(bytes + halves_bytes(problem, columns)),
          padded_rows(problem.kv_len), padded_columns(columns)};
}

cudaError_t split_keys(const Problem& problem, const SplitTensor& target, cudaStream_t stream) {
  const Source source{problem.k,        problem.dtype,  unstored_bias(problem, problem.k_bias), problem.mask.lengths,
                      problem.kv_heads, problem.kv_len, static_cast<int>(problem.head_size)};
  return launch(source, problem.batch, target, stream);
}

cudaError_t split_values(const Problem& problem, const SplitTensor& target, cudaStream_t stream) {
  const Source source{problem.v,        problem.v_dtype, unstored_bias(problem, problem.v_bias), problem.mask.lengths,
                      problem.kv_heads, problem.kv_len,  static_cast<int>(problem.v_head_size)};
  return launch(source, problem.batch, target, stream);
}

}  // namespace onnx_attn::split
