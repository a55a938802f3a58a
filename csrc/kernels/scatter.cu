// scatter.cu: the row updates of ONNX TensorScatter, and the length scan of an attention mask.
#include <cuda_runtime.h>

#include "../device/convert.cuh"
#include "../launch.h"

namespace onnx_attn::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxGrid = 2147483647;  // blocks loop beyond this

int grid_size(int64_t blocks) { return static_cast<int>(blocks < kMaxGrid ? blocks : kMaxGrid); }

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

// One element for each thread, the last axis fastest. Index is 32 bits where they suffice: 64-bit division is slow enough to
// be the bottleneck. 0.81 of memcpy's speed for rows of 256 bytes (H200, 2026-11); four elements a thread were no faster.
template <class Element, class Index>
__global__ void __launch_bounds__(kThreads) scatter_rows(const __grid_constant__ Scatter scatter, int64_t total) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t element = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; element < total; element += step) {
    Index rest = static_cast<Index>(element);
    int64_t cache_offset = 0, update_offset = 0, row = 0;
#pragma unroll
    for (int i = kMaxScatterRank - 1; i > 0; --i) {
      if (i >= scatter.rank) continue;
      const Index size = static_cast<Index>(scatter.sizes[i]);
      const Index coordinate = rest % size;
      rest /= size;
      update_offset += coordinate * scatter.update_strides[i];
      if (i == scatter.axis) {
        row = coordinate;
      } else {
        cache_offset += coordinate * scatter.cache_strides[i];
      }
    }
    const int64_t batch = rest;
    row = target_row(scatter, batch, row);
    if (row < 0) continue;
    cache_offset += batch * scatter.cache_strides[0] + row * scatter.cache_strides[scatter.axis];
    update_offset += batch * scatter.update_strides[0];
    static_cast<Element*>(scatter.cache)[cache_offset] = static_cast<const Element*>(scatter.update)[update_offset];
  }
}

template <class Element>
cudaError_t launch_scatter(const Scatter& scatter, int64_t total, cudaStream_t stream) {
  const int grid = grid_size((total + kThreads - 1) / kThreads);
  if (total <= UINT32_MAX)
    scatter_rows<Element, uint32_t><<<grid, kThreads, 0, stream>>>(scatter, total);
  else
    scatter_rows<Element, uint64_t><<<grid, kThreads, 0, stream>>>(scatter, total);
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
  total = total * scatter.element_size / simple.element_size;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (simple.element_size) {
    case 1: return launch_scatter<uint8_t>(simple, total, cuda_stream);
    case 2: return launch_scatter<uint16_t>(simple, total, cuda_stream);
    case 4: return launch_scatter<uint32_t>(simple, total, cuda_stream);
    case 8: return launch_scatter<uint64_t>(simple, total, cuda_stream);
    case 16: return launch_scatter<uint4>(simple, total, cuda_stream);
    default: return cudaErrorInvalidValue;
  }
}

int valid_kv_length(const ValidLength& problem, void* stream) {
  if (problem.batch == 0) return cudaSuccess;
  scan_lengths<<<grid_size(problem.batch), kScanThreads, 0, static_cast<cudaStream_t>(stream)>>>(problem);
  return cudaGetLastError();
}

}  // namespace onnx_attn::cuda
