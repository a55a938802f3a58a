// scatter.cpp: the row updates of ONNX TensorScatter, and the length scan of an attention mask.
#include <algorithm>
#include <cstring>

#include "../launch.h"
#include "storage.h"

namespace onnx_attn::cpu {
namespace {

#include "convert.inl"

constexpr int64_t kBytesPerTask = 1 << 16;
constexpr int64_t kSerialBytes = 1 << 17;  // below, waking other threads takes longer than the copy

// A Scatter as loops: outer axes, the written axis, and inner blocks that are contiguous on both sides.
struct Loops {
  int rank = 0;  // outer axes, batch first
  int64_t sizes[kMaxScatterRank];
  int64_t cache_strides[kMaxScatterRank];
  int64_t update_strides[kMaxScatterRank];
  int64_t outer = 1;  // product of sizes
  int64_t block = 1;  // elements of an inner block
};

Loops make_loops(const Scatter& scatter) {
  Loops loops;
  int end = scatter.rank;
  // The longest run of last axes, behind the written one, that lies in one piece in both tensors.
  while (end - 1 > scatter.axis && (scatter.sizes[end - 1] == 1 ||
                                    (scatter.cache_strides[end - 1] == loops.block && scatter.update_strides[end - 1] == loops.block))) {
    loops.block *= scatter.sizes[--end];
  }
  for (int axis = 0; axis < end; ++axis) {
    if (axis == scatter.axis) continue;
    loops.sizes[loops.rank] = scatter.sizes[axis];
    loops.cache_strides[loops.rank] = scatter.cache_strides[axis];
    loops.update_strides[loops.rank] = scatter.update_strides[axis];
    loops.outer *= scatter.sizes[axis];
    ++loops.rank;
  }
  return loops;
}

template <int64_t kBytes>
void copy_elements(char* target, int64_t target_step, const char* source, int64_t source_step, int64_t count) {
  for (int64_t i = 0; i < count; ++i) std::memcpy(target + i * target_step, source + i * source_step, kBytes);
}

// Blocks of `bytes` at fixed distances. Single elements get a copy of a known size.
void copy_blocks(char* target, int64_t target_step, const char* source, int64_t source_step, int64_t count, int64_t bytes) {
  switch (bytes) {
    case 1: return copy_elements<1>(target, target_step, source, source_step, count);
    case 2: return copy_elements<2>(target, target_step, source, source_step, count);
    case 4: return copy_elements<4>(target, target_step, source, source_step, count);
    case 8: return copy_elements<8>(target, target_step, source, source_step, count);
    case 16: return copy_elements<16>(target, target_step, source, source_step, count);
    default:
      for (int64_t i = 0; i < count; ++i) std::memcpy(target + i * target_step, source + i * source_step, bytes);
  }
}

// Update rows [begin, end) of one outer index.
void write_rows(const Scatter& scatter, const Loops& loops, int64_t outer, int64_t begin, int64_t end) {
  int64_t cache = 0, update = 0, batch = 0;
  for (int axis = loops.rank - 1; axis >= 0; --axis) {
    const int64_t index = outer % loops.sizes[axis];
    outer /= loops.sizes[axis];
    cache += index * loops.cache_strides[axis];
    update += index * loops.update_strides[axis];
    if (axis == 0) batch = index;
  }
  const int64_t length = scatter.cache_axis_size, size = scatter.element_size;
  int64_t first = scatter.write_indices ? scatter.write_indices[batch] : 0;
  if (scatter.circular) {
    first = (first % length + length) % length;
    // Where an update is longer than the axis its last rows win; leaving the others out makes all rows independent.
    begin = std::max(begin, scatter.sizes[scatter.axis] - length);
  } else {
    if (first >= length || first <= -scatter.sizes[scatter.axis]) return;
    begin = std::max(begin, -first);
    end = std::min(end, length - first);
  }
  const int64_t cache_stride = scatter.cache_strides[scatter.axis], update_stride = scatter.update_strides[scatter.axis];
  while (begin < end) {
    const int64_t row = scatter.circular ? (first + begin) % length : first + begin;
    int64_t run = std::min(end - begin, length - row);  // rows until the axis wraps
    char* target = static_cast<char*>(scatter.cache) + (cache + row * cache_stride) * size;
    const char* source = static_cast<const char*>(scatter.update) + (update + begin * update_stride) * size;
    if (cache_stride == loops.block && update_stride == loops.block) {
      std::memcpy(target, source, run * loops.block * size);
    } else {
      copy_blocks(target, cache_stride * size, source, update_stride * size, run, loops.block * size);
    }
    begin += run;
  }
}

template <class Element, class Allows>
int64_t last_allowed(const TensorMask& mask, int64_t offset, int64_t above, Allows allows) {
  const Element* row = static_cast<const Element*>(mask.data) + offset;
  for (int64_t key = mask.columns - 1; key >= above; --key) {
    if (allows(row[key * mask.key_stride])) return key + 1;
  }
  return above;
}

// 1 + the last allowed key of the row at `offset`, or `above` when none of the keys from there on is allowed.
int64_t scan_row(const TensorMask& mask, int64_t offset, int64_t above) {
  const auto counts = [](auto value) { return to<double>(value) > -1000.0; };
  if (mask.kind == TensorMask::Kind::keep) return last_allowed<uint8_t>(mask, offset, above, [](uint8_t keep) { return keep != 0; });
  switch (mask.dtype) {
    case DType::f64: return last_allowed<double>(mask, offset, above, counts);
    case DType::f32: return last_allowed<float>(mask, offset, above, counts);
    case DType::f16: return last_allowed<Float16>(mask, offset, above, counts);
    default: return last_allowed<BFloat16>(mask, offset, above, counts);
  }
}

}  // namespace

void tensor_scatter(const Scatter& scatter, const ParallelFor& parallel_for) {
  for (int axis = 0; axis < scatter.rank; ++axis) {
    if (scatter.sizes[axis] == 0) return;
  }
  if (scatter.cache_axis_size <= 0) return;
  const Loops loops = make_loops(scatter);
  const int64_t rows = scatter.sizes[scatter.axis];
  const int64_t rows_per_task = std::max<int64_t>(1, kBytesPerTask / (loops.block * scatter.element_size));
  const int64_t parts = (rows + rows_per_task - 1) / rows_per_task;
  const auto run_tasks = [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task % parts * rows_per_task;
      write_rows(scatter, loops, task / parts, first, std::min(first + rows_per_task, rows));
    }
  };
  const int64_t tasks = loops.outer * parts;
  if (loops.outer * rows * loops.block * scatter.element_size < kSerialBytes)
    run_tasks(0, tasks);
  else
    parallel_for(tasks, run_tasks);
}

void valid_kv_length(const ValidLength& problem, const ParallelFor& parallel_for) {
  parallel_for(problem.batch, [&](int64_t begin, int64_t end) {
    for (int64_t batch = begin; batch < end; ++batch) {
      int64_t length = 0;
      for (int64_t head = 0; head < problem.heads; ++head) {
        const TensorMask& mask = problem.mask;
        const int64_t offset = batch * mask.batch_stride + head * mask.head_stride + problem.last_query * mask.query_stride;
        length = scan_row(mask, offset, length);
      }
      problem.lengths[batch] = length;
    }
  });
}

}  // namespace onnx_attn::cpu
