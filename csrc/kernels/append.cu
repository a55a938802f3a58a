// append.cu: past rows and new rows move into the key and value buffers, in one launch.
#include <cuda_runtime.h>

#include "../device/convert.cuh"
#include "../device/packet.cuh"
#include "../launch.h"

namespace onnx_attn::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerThread = 4;  // rows whose loads a thread has in flight

// One of K and V. A team of `lanes` threads copies a row, 16 bytes each; a block copies kRowsPerThread rows for each team.
struct Rows {
  Tensor4 target;
  Tensor4 past;
  Tensor4 fresh;
  const void* bias = nullptr;  // [kv_heads, columns], of dtype bias_dtype, added to fresh rows
  DType dtype = DType::f32;
  DType bias_dtype = DType::f32;
  int64_t columns = 0;
  int64_t past_len = 0;        // rows to copy from `past`: 0 when they are in place already
  int lanes = 1;               // a power of two, at most 32
  int64_t chunks = 0;          // blocks for each batch entry and head
};

struct Copy {
  int64_t kv_heads, new_len, kv_len, first_row_default;
  Lengths first_row;
  int64_t k_blocks;  // blocks below this copy K, the others V
  int64_t total;
};

// One element plus its bias. In double, so that the sum of any two types is rounded once.
template <class Element>
__device__ void add_bias(device::Packet<Element>& packet, const void* bias, DType bias_dtype, int64_t count) {
  device::with_float_type(bias_dtype, [&](auto type) {
    const auto* addends = static_cast<const decltype(type)*>(bias);
#pragma unroll
    for (int e = 0; e < device::Packet<Element>::kCount; ++e) {
      if (e >= count) break;
      const double sum = device::convert<double>(packet.elements[e]) + device::convert<double>(addends[e]);
      packet.elements[e] = device::convert<Element>(sum);
    }
  });
}

// Rows [chunk * rows of a block, ...) of past followed by fresh, for one batch entry and head.
template <class Element>
__device__ void copy_rows(const Rows& rows, const Copy& copy, int64_t batch, int64_t head, int64_t chunk) {
  constexpr int kCount = device::Packet<Element>::kCount;
  const int teams = kThreads / rows.lanes, team = threadIdx.x / rows.lanes, lane = threadIdx.x % rows.lanes;
  const int64_t first = copy.first_row.data ? copy.first_row.unclamped(batch) : copy.first_row_default;
  const int64_t total_rows = rows.past_len + copy.new_len;

  const Element* source[kRowsPerThread];
  Element* target[kRowsPerThread];
  bool takes_bias[kRowsPerThread];
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int64_t row = (chunk * kRowsPerThread + i) * teams + team;
    const bool is_fresh = row >= rows.past_len;
    const Tensor4& from = is_fresh ? rows.fresh : rows.past;
    const int64_t from_row = is_fresh ? row - rows.past_len : row;
    const int64_t to_row = is_fresh ? first + from_row : row;
    // A past row where a fresh one goes stays away, since nothing orders the two writes.
    const bool is_covered = !is_fresh && row >= first && row - first < copy.new_len;
    const bool is_copied = row < total_rows && to_row >= 0 && to_row < copy.kv_len && !is_covered;
    source[i] = static_cast<const Element*>(from.data) + batch * from.batch_stride + head * from.head_stride + from_row * from.row_stride;
    target[i] = is_copied ? static_cast<Element*>(rows.target.data) + batch * rows.target.batch_stride + head * rows.target.head_stride +
                                to_row * rows.target.row_stride
                          : nullptr;
    takes_bias[i] = is_fresh && rows.bias;
  }

#pragma unroll 1
  for (int64_t column = lane * kCount; column < rows.columns; column += rows.lanes * kCount) {
    const int64_t count = rows.columns - column;
    device::Packet<Element> packets[kRowsPerThread];
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) packets[i] = device::load_packet(source[i] + column, target[i] ? count : 0);
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      if (!target[i]) continue;
      if (takes_bias[i]) {
        const int64_t size = rows.bias_dtype == DType::f64 ? 8 : rows.bias_dtype == DType::f32 ? 4 : 2;
        add_bias(packets[i], static_cast<const char*>(rows.bias) + (head * rows.columns + column) * size, rows.bias_dtype, count);
      }
      device::store_packet(target[i] + column, packets[i], count);
    }
  }
}

__global__ void __launch_bounds__(kThreads) append_rows(const __grid_constant__ Rows k, const __grid_constant__ Rows v,
                                                        const __grid_constant__ Copy copy) {
  for (int64_t index = blockIdx.x; index < copy.total; index += gridDim.x) {
    const bool is_key = index < copy.k_blocks;
    const Rows& rows = is_key ? k : v;
    int64_t rest = is_key ? index : index - copy.k_blocks;
    const int64_t chunk = rest % rows.chunks;
    rest /= rows.chunks;
    const int64_t head = rest % copy.kv_heads, batch = rest / copy.kv_heads;
    device::with_float_type(rows.dtype, [&](auto type) { copy_rows<decltype(type)>(rows, copy, batch, head, chunk); });
  }
}

Rows make_rows(const Tensor4& target, const Tensor4& past, const Tensor4& fresh, const void* bias, DType dtype, int64_t columns,
               const Problem& problem) {
  Rows rows;
  rows.target = target;
  rows.past = past;
  rows.fresh = fresh;
  rows.bias = bias;
  rows.dtype = dtype;
  rows.bias_dtype = problem.dtype;
  rows.columns = columns;
  rows.past_len = past.data ? problem.append.past_len : 0;
  const int64_t packets = (columns * (dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2) + 15) / 16;
  while (rows.lanes < 32 && rows.lanes < packets) rows.lanes *= 2;
  const int64_t rows_per_block = kThreads / rows.lanes * kRowsPerThread;
  const int64_t count = columns > 0 ? rows.past_len + problem.append.new_len : 0;
  rows.chunks = (count + rows_per_block - 1) / rows_per_block;
  return rows;
}

}  // namespace

int append(const Problem& problem, void* stream) {
  const Append& append = problem.append;
  if (!append.active) return cudaSuccess;
  const Rows k = make_rows(problem.k, append.past_k, append.new_k, problem.k_bias, problem.dtype, problem.head_size, problem);
  const Rows v = make_rows(problem.v, append.past_v, append.new_v, problem.v_bias, problem.v_dtype, problem.v_head_size, problem);

  Copy copy;
  copy.kv_heads = problem.kv_heads;
  copy.new_len = append.new_len;
  copy.kv_len = problem.kv_len;
  copy.first_row_default = append.past_len;
  copy.first_row = append.first_row;
  copy.k_blocks = problem.batch * problem.kv_heads * k.chunks;
  copy.total = copy.k_blocks + problem.batch * problem.kv_heads * v.chunks;
  if (copy.total == 0) return cudaSuccess;
  constexpr int64_t kMaxGrid = 2147483647;  // blocks loop beyond this
  const int grid = static_cast<int>(copy.total < kMaxGrid ? copy.total : kMaxGrid);
  append_rows<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(k, v, copy);
  return cudaGetLastError();
}

}  // namespace onnx_attn::cuda
