// append.cu: past rows and new rows move into the key and value buffers, in one launch.
#include <cuda_runtime.h>

#include <initializer_list>
#include <type_traits>

#include "../device/convert.cuh"
#include "../device/packet.cuh"
#include "../launch.h"
#include "grid_size.h"

namespace onnx_attn::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerThread = 4;  // rows whose loads a thread has in flight

// One of K and V. A block copies past rows or fresh rows of one batch entry and head: a team of `lanes` threads for each row,
// 16 bytes each, and kRowsPerThread rows for each team.
struct Rows {
  Tensor4 target;
  Tensor4 past;
  Tensor4 fresh;
  const void* bias;  // [kv_heads, columns], of dtype bias_dtype, added to fresh rows; or null
  DType dtype;
  DType bias_dtype;
  int64_t columns;
  int lanes = 1;  // a power of two, at most 32
  int64_t past_chunks = 0;
  int64_t chunks = 0;  // blocks for each batch entry and head: those of past rows, then those of fresh ones
};

struct Copy {
  int64_t kv_heads = 0;
  int64_t past_len = 0;  // rows to copy: 0 when they are in place already
  int64_t new_len = 0;
  int64_t kv_len = 0;
  int64_t default_first_row = 0;
  Lengths first_row;
  int64_t k_blocks = 0;  // blocks below this copy K, the others V
  int64_t total = 0;
};

// The sum is rounded once, to Element: of two numbers of one narrow type, float32 holds enough digits for that, and of others
// float64 does.
template <class Element>
__device__ void add_bias(device::Packet<Element>& packet, const void* bias, DType bias_dtype, int64_t first, int64_t count) {
  device::with_float_type(bias_dtype, [&](auto type) {
    using Addend = decltype(type);
    using Sum = std::conditional_t<std::is_same_v<Element, Addend> && sizeof(Element) <= sizeof(float), float, double>;
    const Addend* addends = static_cast<const Addend*>(bias) + first;
#pragma unroll
    for (int e = 0; e < device::Packet<Element>::kCount; ++e) {
      if (e >= count) break;
      packet.elements[e] = device::convert<Element>(device::convert<Sum>(packet.elements[e]) + device::convert<Sum>(addends[e]));
    }
  });
}

// Element is a floating type, or uint4 where rows are whole packets that move as they are.
template <class Element>
__device__ void copy_rows(const Rows& rows, const Copy& copy, int64_t batch, int64_t head, int64_t chunk) {
  constexpr int kCount = device::Packet<Element>::kCount;
  const int teams = kThreads / rows.lanes, team = threadIdx.x / rows.lanes, lane = threadIdx.x % rows.lanes;
  const int chunk_rows = teams * kRowsPerThread;
  int64_t first_fresh = copy.first_row.data ? copy.first_row.unclamped(batch) : copy.default_first_row;
  first_fresh = first_fresh < -copy.new_len ? -copy.new_len : first_fresh > copy.kv_len ? copy.kv_len : first_fresh;

  const bool is_fresh = chunk >= rows.past_chunks;
  const Tensor4& from = is_fresh ? rows.fresh : rows.past;
  const int64_t chunk_begin = (is_fresh ? chunk - rows.past_chunks : chunk) * chunk_rows;
  const int64_t shift = is_fresh ? first_fresh : 0;  // row r goes to r + shift
  // Rows of the chunk to copy: those in [begin, end) but not in the hole, where fresh rows take the place of past ones and
  // nothing orders the two writes.
  const auto in_chunk = [&](int64_t row) {
    const int64_t distance = row - chunk_begin;
    return distance < 0 ? 0 : distance > chunk_rows ? chunk_rows : static_cast<int>(distance);
  };
  const int64_t count = is_fresh ? copy.new_len : copy.past_len;
  const int begin = in_chunk(-shift), end = in_chunk(count < copy.kv_len - shift ? count : copy.kv_len - shift);
  const int hole_begin = is_fresh ? 0 : in_chunk(first_fresh), hole_end = is_fresh ? 0 : in_chunk(first_fresh + copy.new_len);
  const auto is_copied = [&](int row) { return row >= begin && row < end && (row < hole_begin || row >= hole_end); };

  const Element* source =
      static_cast<const Element*>(from.data) + batch * from.batch_stride + head * from.head_stride + (chunk_begin + team) * from.row_stride;
  Element* target = static_cast<Element*>(rows.target.data) + batch * rows.target.batch_stride + head * rows.target.head_stride +
                    (chunk_begin + team + shift) * rows.target.row_stride;
  const int64_t source_step = teams * from.row_stride, target_step = teams * rows.target.row_stride;

#pragma unroll 1
  for (int64_t column = lane * kCount; column < rows.columns; column += rows.lanes * kCount) {
    const int64_t left = rows.columns - column;
    device::Packet<Element> packets[kRowsPerThread];
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      packets[i] = device::load_packet(source + i * source_step + column, is_copied(team + i * teams) ? left : 0);
    }
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      if (!is_copied(team + i * teams)) continue;
      if constexpr (!std::is_same_v<Element, uint4>) {
        if (is_fresh && rows.bias) add_bias(packets[i], rows.bias, rows.bias_dtype, head * rows.columns + column, left);
      }
      device::store_packet(target + i * target_step + column, packets[i], left);
    }
  }
}

// Whole packets have a kernel of their own: the registers of the general case would halve the loads in flight, and the speed.
template <bool kIsPackets>
__global__ void __launch_bounds__(kThreads, kIsPackets ? 4 : 2)
    append_rows(const __grid_constant__ Rows k, const __grid_constant__ Rows v, const __grid_constant__ Copy copy) {
  for (int64_t index = blockIdx.x; index < copy.total; index += gridDim.x) {
    const bool is_key = index < copy.k_blocks;
    const Rows& rows = is_key ? k : v;
    int64_t rest = is_key ? index : index - copy.k_blocks;
    const int64_t chunk = rest % rows.chunks;
    rest /= rows.chunks;
    const int64_t head = rest % copy.kv_heads, batch = rest / copy.kv_heads;
    if constexpr (kIsPackets) {
      copy_rows<uint4>(rows, copy, batch, head, chunk);
    } else {
      device::with_float_type(rows.dtype, [&](auto type) { copy_rows<decltype(type)>(rows, copy, batch, head, chunk); });
    }
  }
}

// Whether rows are whole packets on 16-byte boundaries and move as they are.
bool is_packets(const Rows& rows) {
  if (rows.bias) return false;
  int64_t bytes = rows.columns;
  uint64_t addresses = 0;
  for (const Tensor4& tensor : {rows.target, rows.past, rows.fresh}) {
    bytes |= tensor.batch_stride | tensor.head_stride | tensor.row_stride;
    addresses |= reinterpret_cast<uintptr_t>(tensor.data);
  }
  return bytes * float_bytes(rows.dtype) % 16 == 0 && addresses % 16 == 0;
}

// Counts in packets instead of elements.
void widen(Rows* rows) {
  const int64_t count = 16 / float_bytes(rows->dtype);
  rows->columns /= count;
  for (Tensor4* tensor : {&rows->target, &rows->past, &rows->fresh}) {
    tensor->batch_stride /= count;
    tensor->head_stride /= count;
    tensor->row_stride /= count;
  }
}

// How the work is cut.
void cut_rows(Rows* rows, const Copy& copy) {
  const int64_t packets = (rows->columns * float_bytes(rows->dtype) + 15) / 16;
  while (rows->lanes < 32 && rows->lanes < packets) rows->lanes *= 2;
  const int64_t rows_per_block = kThreads / rows->lanes * kRowsPerThread;
  if (rows->columns == 0) return;
  rows->past_chunks = (copy.past_len + rows_per_block - 1) / rows_per_block;
  rows->chunks = rows->past_chunks + (copy.new_len + rows_per_block - 1) / rows_per_block;
}

}  // namespace

int append(const Problem& problem, void* stream) {
  const Append& append = problem.append;
  if (!append.active) return cudaSuccess;
  Copy copy;
  copy.kv_heads = problem.kv_heads;
  copy.past_len = append.past_k.data ? append.past_len : 0;
  copy.new_len = append.new_len;
  copy.kv_len = problem.kv_len;
  copy.default_first_row = append.past_len;
  copy.first_row = append.first_row;

  Rows k{problem.k, append.past_k, append.new_k, problem.k_bias, problem.dtype, problem.dtype, problem.head_size};
  Rows v{problem.v, append.past_v, append.new_v, problem.v_bias, problem.v_dtype, problem.dtype, problem.v_head_size};
  cut_rows(&k, copy);
  cut_rows(&v, copy);
  copy.k_blocks = problem.batch * problem.kv_heads * k.chunks;
  copy.total = copy.k_blocks + problem.batch * problem.kv_heads * v.chunks;
  if (copy.total == 0) return cudaSuccess;
  const int grid = grid_size(copy.total);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (is_packets(k) && is_packets(v)) {
    widen(&k);
    widen(&v);
    append_rows<true><<<grid, kThreads, 0, cuda_stream>>>(k, v, copy);
  } else {
    append_rows<false><<<grid, kThreads, 0, cuda_stream>>>(k, v, copy);
  }
  return cudaGetLastError();
}

}  // namespace onnx_attn::cuda
