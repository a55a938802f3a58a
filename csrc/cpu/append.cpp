// append.cpp: copies past rows into the cache and writes the new rows, with their projection bias, behind them.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "../launch.h"
#include "storage.h"

namespace onnx_attn::cpu {
namespace {

#include "convert.inl"

// Rows that one task copies: enough bytes to be worth a thread, few enough to share out a single head.
constexpr int64_t kRowsPerTask = 256;
// Below this many elements waking other threads takes longer than the copy.
constexpr int64_t kSerialElements = 1 << 16;

// One of the two tensors that an append writes.
struct Target {
  Tensor4 past, fresh, cache;
  int64_t size;   // elements of a row
  int64_t bytes;  // of an element
  DType dtype;
  const void* bias;  // [kv_heads, size] of bias_dtype, or null
  DType bias_dtype;
};

template <class Storage, class Bias>
void add_row(const void* row, const void* bias, int64_t size, void* result) {
  // With an f64 operand the sum is formed in f64, otherwise in f32; either way it is rounded once.
  using Sum = std::conditional_t<sizeof(Storage) == 8 || sizeof(Bias) == 8, double, float>;
  const auto* x = static_cast<const Storage*>(row);
  const auto* b = static_cast<const Bias*>(bias);
  for (int64_t i = 0; i < size; ++i) from<Sum>(to<Sum>(x[i]) + to<Sum>(b[i]), static_cast<Storage*>(result) + i);
}

template <class Storage>
void add_bias(const void* row, const void* bias, DType bias_dtype, int64_t size, void* result) {
  switch (bias_dtype) {
    case DType::f64: return add_row<Storage, double>(row, bias, size, result);
    case DType::f32: return add_row<Storage, float>(row, bias, size, result);
    case DType::f16: return add_row<Storage, Float16>(row, bias, size, result);
    default: return add_row<Storage, BFloat16>(row, bias, size, result);
  }
}

char* address(const Tensor4& tensor, int64_t bytes, int64_t batch, int64_t head, int64_t row) {
  return static_cast<char*>(tensor.data) + (batch * tensor.batch_stride + head * tensor.head_stride + row * tensor.row_stride) * bytes;
}

// Rows [begin, end) of `source` to the rows `shift` further on in the cache.
void copy_rows(const Target& target, const Tensor4& source, int64_t batch, int64_t head, int64_t begin, int64_t end, int64_t shift) {
  if (begin >= end || target.size == 0) return;
  const int64_t row_bytes = target.size * target.bytes;
  if (source.row_stride == target.size && target.cache.row_stride == target.size) {
    std::memcpy(address(target.cache, target.bytes, batch, head, begin + shift), address(source, target.bytes, batch, head, begin),
                (end - begin) * row_bytes);
    return;
  }
  for (int64_t row = begin; row < end; ++row) {
    std::memcpy(address(target.cache, target.bytes, batch, head, row + shift), address(source, target.bytes, batch, head, row), row_bytes);
  }
}

void write_new_rows(const Target& target, int64_t batch, int64_t head, int64_t begin, int64_t end, int64_t shift) {
  if (!target.bias) return copy_rows(target, target.fresh, batch, head, begin, end, shift);
  const char* bias = static_cast<const char*>(target.bias) + head * target.size * float_bytes(target.bias_dtype);
  for (int64_t row = begin; row < end; ++row) {
    const char* source = address(target.fresh, target.bytes, batch, head, row);
    char* result = address(target.cache, target.bytes, batch, head, row + shift);
    switch (target.dtype) {
      case DType::f64: add_bias<double>(source, bias, target.bias_dtype, target.size, result); break;
      case DType::f32: add_bias<float>(source, bias, target.bias_dtype, target.size, result); break;
      case DType::f16: add_bias<Float16>(source, bias, target.bias_dtype, target.size, result); break;
      default: add_bias<BFloat16>(source, bias, target.bias_dtype, target.size, result); break;
    }
  }
}

}  // namespace

void append(const Problem& problem, const ParallelFor& parallel_for) {
  const Append& append = problem.append;
  if (!append.active) return;
  const Target targets[2] = {
      {append.past_k, append.new_k, problem.k, problem.head_size, float_bytes(problem.dtype), problem.dtype, problem.k_bias, problem.dtype},
      {append.past_v, append.new_v, problem.v, problem.v_head_size, float_bytes(problem.v_dtype), problem.v_dtype, problem.v_bias,
       problem.dtype},
  };
  const int64_t past_tasks = (append.past_len + kRowsPerTask - 1) / kRowsPerTask;
  const int64_t new_tasks = (append.new_len + kRowsPerTask - 1) / kRowsPerTask;
  const int64_t tasks = past_tasks + new_tasks;

  // Every cache row is written by one task only, so that the order of tasks does not matter: past rows that new ones replace are left out.
  const auto run_task = [&](int64_t task) {
    const int64_t part = task % tasks, head = task / tasks % problem.kv_heads, batch = task / tasks / problem.kv_heads;
    const int64_t first = append.first_row.data ? append.first_row.unclamped(batch) : append.past_len;
    for (const Target& target : targets) {
      if (part < past_tasks) {
        if (!target.past.data) continue;
        const int64_t begin = part * kRowsPerTask, end = std::min({begin + kRowsPerTask, append.past_len, problem.kv_len});
        copy_rows(target, target.past, batch, head, begin, std::min(end, first), 0);
        copy_rows(target, target.past, batch, head, std::max(begin, first + append.new_len), end, 0);
      } else {
        const int64_t begin = (part - past_tasks) * kRowsPerTask, end = std::min(begin + kRowsPerTask, append.new_len);
        write_new_rows(target, batch, head, std::max(begin, -first), std::min(end, problem.kv_len - first), first);
      }
    }
  };
  const auto run_tasks = [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) run_task(task);
  };
  const int64_t all = problem.batch * problem.kv_heads * tasks;
  const int64_t copied = append.new_len + (append.past_k.data ? append.past_len : 0);
  const int64_t elements = problem.batch * problem.kv_heads * copied * (problem.head_size + problem.v_head_size);
  if (elements < kSerialElements)
    run_tasks(0, all);
  else
    parallel_for(all, run_tasks);
}

}  // namespace onnx_attn::cpu
