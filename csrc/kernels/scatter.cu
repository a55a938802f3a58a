// scatter.cu: the row updates of ONNX TensorScatter, and the length scan of an attention mask.
#include <cuda_runtime.h>

#include "../device/convert.cuh"
#include "../launch.h"
#include "grid_size.h"

namespace onnx_attn::cuda {

namespace {

constexpr int kThreads = 256;

// Widest access, up to 16 bytes, at which both tensors can be moved: along a last axis that is contiguous in both, with
// every row on a boundary.
int access_bytes(const Scatter& scatter) {
  const int last = scatter.rank - 1;
  const int size = scatter.element_size;
  if (last == scatter.axis || scatter.cache_strides[last] != 1 || scatter.update_strides[last] != 1) return size;
  uint64_t alignment = reinterpret_cast<uintptr_t>(scatter.cache) | reinterpret_cast<uintptr_t>(scatter.update);
  alignment |= static_cast<uint64_t>(scatter.sizes[last]) * size;
  for (int i = 0; i < last; ++i) alignment |= static_cast<uint64_t>(scatter.cache_strides[i] | scatter.update_strides[i]) * size;
  int bytes = 16;
  while (bytes > size && alignment % bytes != 0) bytes /= 2;
  return bytes;
}

void remove_axis(Scatter* scatter, int axis) {
  for (int i = axis; i + 1 < scatter->rank; ++i) {
    scatter->sizes[i] = scatter->sizes[i + 1];
    scatter->cache_strides[i] = scatter->cache_strides[i + 1];
    scatter->update_strides[i] = scatter->update_strides[i + 1];
  }
  scatter->rank -= 1;
  if (axis < scatter->axis) scatter->axis -= 1;
}

// The same update with as few axes and as wide elements as the strides allow. Axis 0 and the scatter axis keep their meaning.
Scatter simplify(Scatter scatter) {
  for (int i = 0; i < scatter.rank; ++i) {  // the stride of an axis of one element is arbitrary, and must not narrow the access
    const int64_t cache_size = i == scatter.axis ? scatter.cache_axis_size : scatter.sizes[i];
    if (cache_size == 1) scatter.cache_strides[i] = 0;
    if (scatter.sizes[i] == 1) scatter.update_strides[i] = 0;
  }
  for (int i = scatter.rank - 1; i > 0; --i) {
    if (i != scatter.axis && scatter.sizes[i] == 1) remove_axis(&scatter, i);
  }
  for (int i = scatter.rank - 1; i > 1; --i) {  // merge axis i into axis i - 1
    if (i == scatter.axis || i - 1 == scatter.axis) continue;
    if (scatter.cache_strides[i - 1] != scatter.cache_strides[i] * scatter.sizes[i]) continue;
    if (scatter.update_strides[i - 1] != scatter.update_strides[i] * scatter.sizes[i]) continue;
    const int64_t merged = scatter.sizes[i - 1] * scatter.sizes[i];
    scatter.cache_strides[i - 1] = scatter.cache_strides[i];
    scatter.update_strides[i - 1] = scatter.update_strides[i];
    scatter.sizes[i - 1] = merged;
    remove_axis(&scatter, i);
  }
  const int widening = access_bytes(scatter) / scatter.element_size;
  if (widening > 1) {
    const int last = scatter.rank - 1;
    scatter.element_size *= widening;
    scatter.sizes[last] /= widening;
    for (int i = 0; i < last; ++i) {
      scatter.cache_strides[i] /= widening;
      scatter.update_strides[i] /= widening;
    }
  }
  return scatter;
}

// Where row `row` of the update goes along the axis, or -1 when it is dropped.
__device__ __forceinline__ int64_t target_row(const Scatter& scatter, int64_t batch, int64_t row) {
  const int64_t size = scatter.cache_axis_size, rows = scatter.sizes[scatter.axis];
  const int64_t start = scatter.write_indices ? scatter.write_indices[batch] : 0;
  if (!scatter.circular) {
    if (start >= size || start <= -rows) return -1;  // and no start near the ends of int64 can overflow the sum
    const int64_t target = start + row;
    return target >= 0 && target < size ? target : -1;
  }
  if (row + size < rows) return -1;  // a later row lands on the same place, and wins
  // 64-bit division is slow; in ordinary use neither is needed.
  int64_t target = start >= 0 && start < size ? start : start % size;
  if (target < 0) target += size;
  target += row < size ? row : row % size;
  return target < size ? target : target - size;
}

// How an update is cut into blocks: each takes rows of one slice, that is of one index of every axis other than the scatter axis
// and the last. A team of `lanes` threads moves a row, kRowsInFlight of them at a time: 0.93 of the speed of a copy of as many bytes
// in rows of 256; 1, 2, 8 and 16 rows, and accesses that pass by the caches, were slower (H200, 2026-11).
constexpr int kRowsInFlight = 4;
struct Cut {
  int outer_axes[kMaxScatterRank];  // the last one first, without the batch
  int outer_count = 0;
  int64_t columns = 1;  // of the last axis, or 1 if that is the scatter axis
  int64_t cache_column_stride = 0, update_column_stride = 0;
  int lanes = 1;
  int threads = 32;
  int64_t slice_blocks = 1;
  int64_t blocks = 1;
};

Cut cut_slices(const Scatter& scatter) {
  Cut cut;
  const int last = scatter.rank - 1;
  if (last != scatter.axis && last > 0) {
    cut.columns = scatter.sizes[last];
    cut.cache_column_stride = scatter.cache_strides[last];
    cut.update_column_stride = scatter.update_strides[last];
  }
  cut.blocks = scatter.sizes[0];
  for (int i = last; i > 0; --i) {
    if (i == scatter.axis || i == last) continue;
    cut.outer_axes[cut.outer_count++] = i;
    cut.blocks *= scatter.sizes[i];
  }
  const int64_t rows = scatter.sizes[scatter.axis];
  while (cut.lanes < 32 && cut.lanes < cut.columns) cut.lanes *= 2;
  while (cut.threads < kThreads && cut.threads / cut.lanes * kRowsInFlight < rows) cut.threads *= 2;
  const int64_t block_rows = cut.threads / cut.lanes * kRowsInFlight;
  cut.slice_blocks = (rows + block_rows - 1) / block_rows;
  cut.blocks *= cut.slice_blocks;
  return cut;
}

template <class Element>
__global__ void __launch_bounds__(kThreads) scatter_rows(const __grid_constant__ Scatter scatter, const __grid_constant__ Cut cut) {
  const int teams = blockDim.x / cut.lanes, team = threadIdx.x / cut.lanes, lane = threadIdx.x % cut.lanes;
  const int64_t rows = scatter.sizes[scatter.axis];
  for (int64_t block = blockIdx.x; block < cut.blocks; block += gridDim.x) {
    int64_t slice = block / cut.slice_blocks;
    const int64_t first_row = (block - slice * cut.slice_blocks) * teams * kRowsInFlight + team;
    const Element* source = static_cast<const Element*>(scatter.update);
    Element* target = static_cast<Element*>(scatter.cache);
    for (int i = 0; i < cut.outer_count; ++i) {
      const int axis = cut.outer_axes[i];
      const int64_t rest = slice / scatter.sizes[axis], index = slice - rest * scatter.sizes[axis];
      source += index * scatter.update_strides[axis];
      target += index * scatter.cache_strides[axis];
      slice = rest;
    }
    source += slice * scatter.update_strides[0];
    target += slice * scatter.cache_strides[0];
    int64_t target_rows[kRowsInFlight];
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      const int64_t row = first_row + i * teams;
      target_rows[i] = row < rows ? target_row(scatter, slice, row) : -1;
    }
#pragma unroll 1
    for (int64_t column = lane; column < cut.columns; column += cut.lanes) {
      Element elements[kRowsInFlight];
#pragma unroll
      for (int i = 0; i < kRowsInFlight; ++i) {
        const Element* row = source + (first_row + i * teams) * scatter.update_strides[scatter.axis];
        if (target_rows[i] >= 0) elements[i] = row[column * cut.update_column_stride];
      }
#pragma unroll
      for (int i = 0; i < kRowsInFlight; ++i) {
        Element* row = target + target_rows[i] * scatter.cache_strides[scatter.axis];
        if (target_rows[i] >= 0) row[column * cut.cache_column_stride] = elements[i];
      }
    }
  }
}

template <class Element>
cudaError_t launch_scatter(const Scatter& scatter, cudaStream_t stream) {
  const Cut cut = cut_slices(scatter);
  scatter_rows<Element><<<grid_size(cut.blocks), cut.threads, 0, stream>>>(scatter, cut);
  return cudaGetLastError();
}

constexpr int kScanThreads = 1024;
constexpr int kScanLoads = 4;  // columns whose loads a thread has in flight

// Last key that one head's row allows, among this thread's columns above `best`; else `best`. Scans from the end.
template <class Element, class IsAllowed>
__device__ int64_t scan_row(const Element* row, int64_t key_stride, int64_t columns, int64_t best, IsAllowed is_allowed) {
  for (int64_t last = columns - 1 - threadIdx.x; last > best; last -= kScanThreads * kScanLoads) {
    bool allowed[kScanLoads];
#pragma unroll
    for (int i = 0; i < kScanLoads; ++i) {
      const int64_t column = last - i * kScanThreads;
      allowed[i] = column >= 0 && is_allowed(row[column * key_stride]);
    }
#pragma unroll
    for (int i = 0; i < kScanLoads; ++i) {
      const int64_t column = last - i * kScanThreads;
      if (allowed[i] && column > best) best = column;
    }
  }
  return best;
}

// A block for each batch entry.
__global__ void __launch_bounds__(kScanThreads) scan_lengths(const __grid_constant__ ValidLength problem) {
  const TensorMask& mask = problem.mask;
  __shared__ int64_t warp_best[kScanThreads / 32];
  for (int64_t batch = blockIdx.x; batch < problem.batch; batch += gridDim.x) {
    int64_t best = -1;
    const int64_t heads = mask.head_stride == 0 && problem.heads > 1 ? 1 : problem.heads;
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t offset = batch * mask.batch_stride + head * mask.head_stride + problem.last_query * mask.query_stride;
      if (mask.kind == TensorMask::Kind::keep) {
        const auto* row = static_cast<const uint8_t*>(mask.data) + offset;
        best = scan_row(row, mask.key_stride, mask.columns, best, [](uint8_t keep) { return keep != 0; });
      } else {
        device::with_float_type(mask.dtype, [&](auto type) {
          const auto* row = static_cast<const decltype(type)*>(mask.data) + offset;
          best = scan_row(row, mask.key_stride, mask.columns, best, [](auto bias) { return device::convert<double>(bias) > -1000.0; });
        });
      }
    }

    for (int lanes = 16; lanes > 0; lanes /= 2) {
      const int64_t other = __shfl_xor_sync(0xffffffffu, static_cast<long long>(best), lanes);
      if (other > best) best = other;
    }
    __syncthreads();  // the entry before has been read
    if (threadIdx.x % 32 == 0) warp_best[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int warp = 1; warp < kScanThreads / 32; ++warp) {
        if (warp_best[warp] > best) best = warp_best[warp];
      }
      problem.lengths[batch] = best + 1;
    }
  }
}

}  // namespace

int tensor_scatter(const Scatter& scatter, void* stream) {
  if (scatter.cache_axis_size <= 0) return cudaSuccess;
  int64_t total = 1;
  for (int i = 0; i < scatter.rank; ++i) total *= scatter.sizes[i];
  if (total == 0) return cudaSuccess;
  const Scatter simple = simplify(scatter);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (simple.element_size) {
    case 1: return launch_scatter<uint8_t>(simple, cuda_stream);
    case 2: return launch_scatter<uint16_t>(simple, cuda_stream);
    case 4: return launch_scatter<uint32_t>(simple, cuda_stream);
    case 8: return launch_scatter<uint64_t>(simple, cuda_stream);
    case 16: return launch_scatter<uint4>(simple, cuda_stream);
    default: return cudaErrorInvalidValue;
  }
}

int valid_kv_length(const ValidLength& problem, void* stream) {
  if (problem.batch == 0) return cudaSuccess;
  scan_lengths<<<grid_size(problem.batch), kScanThreads, 0, static_cast<cudaStream_t>(stream)>>>(problem);
  return cudaGetLastError();
}

}  // namespace onnx_attn::cuda
