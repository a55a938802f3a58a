// cache_op.cpp: ONNX TensorScatter, pure and in place, and the valid length of an attention mask.
#include <algorithm>

#include "forward_only.h"
#include "written.h"

namespace onnx_attn {

namespace {

int bytes_of(const Tensor& tensor, const char* name) {
  const int bytes = element_size(type_of(tensor));
  ONNX_ATTN_CHECK(bytes > 0, name, ": has ", dtype_name(type_of(tensor)), ", which tensor_scatter cannot copy");
  return bytes;
}

Scatter describe_scatter(const Tensor& cache, const char* cache_name, const Tensor& update, OptionalTensor& write_indices, int64_t axis,
                         bool circular) {
  check_given(cache, cache_name);
  check_given(update, "update");
  const int64_t rank = cache.dim();
  ONNX_ATTN_CHECK(2 <= rank && rank <= kMaxScatterRank, cache_name, ": has shape ", shape_text(cache), "; it must have 2 to ",
                  kMaxScatterRank, " axes, the first being the batch");
  ONNX_ATTN_CHECK(-rank <= axis && axis < rank && axis != 0 && axis != -rank, "axis: is ", axis, "; it must name an axis of ", cache_name,
                  " ", shape_text(cache), " other than the batch axis 0");
  const int64_t positive_axis = axis < 0 ? axis + rank : axis;
  ONNX_ATTN_CHECK(type_of(update) == type_of(cache), "update: has dtype ", dtype_name(type_of(update)), ", but ", cache_name, " has ",
                  dtype_name(type_of(cache)));
  check_same_device(update, "update", cache, cache_name);
  ONNX_ATTN_CHECK(update.dim() == rank, "update: has shape ", shape_text(update), "; it must have ", rank, " axes like ", cache_name);

  Scatter scatter;
  scatter.element_size = bytes_of(cache, cache_name);
  scatter.rank = static_cast<int>(rank);
  scatter.axis = static_cast<int>(positive_axis);
  scatter.cache_axis_size = cache.size(positive_axis);
  scatter.circular = circular;
  for (int64_t i = 0; i < rank; ++i) {
    ONNX_ATTN_CHECK(i == positive_axis || update.size(i) == cache.size(i), "update: has shape ", shape_text(update), ", but ", cache_name,
                    " has ", shape_text(cache), "; they may differ on axis ", positive_axis, " only");
    scatter.sizes[i] = update.size(i);
    scatter.cache_strides[i] = cache.stride(i);
    scatter.update_strides[i] = update.stride(i);
  }
  const int64_t rows = update.size(positive_axis), capacity = scatter.cache_axis_size, batch = cache.size(0);
  ONNX_ATTN_CHECK(rows <= capacity, "update: has ", rows, " rows on axis ", positive_axis, ", but ", cache_name, " holds only ", capacity);
  scatter.update = update.const_data_ptr();
  scatter.cache = const_cast<void*>(cache.const_data_ptr());

  if (write_indices) {
    ONNX_ATTN_CHECK(type_of(*write_indices) == ScalarType::Long, "write_indices: has dtype ", dtype_name(type_of(*write_indices)),
                    "; it must be int64");
    ONNX_ATTN_CHECK(write_indices->dim() == 1 && write_indices->size(0) == batch, "write_indices: has shape ", shape_text(*write_indices),
                    "; it must be [batch] = [", batch, "]");
    check_same_device(*write_indices, "write_indices", cache, cache_name);
    write_indices = torch::stable::contiguous(*write_indices);
    scatter.write_indices = static_cast<const int64_t*>(write_indices->const_data_ptr());
    if (cache.is_cpu()) {
      for (int64_t entry = 0; entry < batch; ++entry) {
        const int64_t first = scatter.write_indices[entry];
        ONNX_ATTN_CHECK(first >= 0 && (circular || first <= capacity - rows), "write_indices: entry ", entry, " is ", first, "; ", rows,
                        " rows must fit in an axis of ", capacity, circular ? " (an index may not be negative)" : "");
      }
    }
  }
  return scatter;
}

Tensor tensor_scatter(const Tensor& past_cache, const Tensor& update, OptionalTensor write_indices, int64_t axis, bool circular) {
  Scatter scatter = describe_scatter(past_cache, "past_cache", update, write_indices, axis, circular);
  const DeviceScope scope(past_cache);
  Tensor present = torch::stable::clone(torch::stable::contiguous(past_cache));
  scatter.cache = present.mutable_data_ptr();
  for (int64_t i = 0; i < present.dim(); ++i) scatter.cache_strides[i] = present.stride(i);
  run(scatter, present);
  return present;
}

void tensor_scatter_in_place(const Tensor& cache, const Tensor& update, OptionalTensor write_indices, int64_t axis, bool circular) {
  check_no_gradient(cache, "cache");
  const Scatter scatter = describe_scatter(cache, "cache", update, write_indices, axis, circular);
  check_written({cache, "cache"}, {{update, "update"}, {write_indices, "write_indices"}});
  const DeviceScope scope(cache);
  run(scatter, cache);
  count_write(cache);
}

Tensor valid_kv_length(const Tensor& attn_mask) {
  check_given(attn_mask, "attn_mask");
  const ScalarType type = type_of(attn_mask);
  ONNX_ATTN_CHECK(type == ScalarType::Bool || is_floating(type), "attn_mask: has dtype ", dtype_name(type),
                  "; allowed are bool (true keeps) and floating types (above -1000 keeps)");
  const int64_t rank = attn_mask.dim();
  ONNX_ATTN_CHECK(1 <= rank && rank <= 4, "attn_mask: has rank ", rank,
                  "; it must have 1 to 4 axes, aligned right to [batch, q_heads, q_len, kv_len]");
  const auto size = [&](int64_t from_right) { return from_right < rank ? attn_mask.size(rank - 1 - from_right) : 1; };
  const auto stride = [&](int64_t from_right) {
    return from_right < rank && size(from_right) > 1 ? attn_mask.stride(rank - 1 - from_right) : 0;
  };

  const DeviceScope scope(attn_mask);
  ValidLength problem;
  problem.mask.kind = type == ScalarType::Bool ? TensorMask::Kind::keep : TensorMask::Kind::bias;
  problem.mask.dtype = dtype_of(attn_mask);
  problem.mask.data = attn_mask.const_data_ptr();
  problem.mask.columns = size(1) == 0 ? 0 : size(0);  // without a query row no key is allowed
  problem.mask.key_stride = stride(0);
  problem.mask.query_stride = stride(1);
  problem.mask.head_stride = stride(2);
  problem.mask.batch_stride = stride(3);
  problem.batch = size(3);
  problem.heads = size(2);
  problem.last_query = std::max<int64_t>(size(1) - 1, 0);
  Tensor lengths = empty_contiguous(attn_mask, ScalarType::Long, {problem.batch});
  problem.lengths = static_cast<int64_t*>(lengths.mutable_data_ptr());
  run(problem, attn_mask);
  return lengths;
}

void register_caches(torch::stable::detail::StableLibrary& m) {
  m.impl("tensor_scatter", TORCH_BOX(&ForwardOnly<&tensor_scatter>::call));
  m.impl("tensor_scatter_", TORCH_BOX(&tensor_scatter_in_place));
  m.impl("valid_kv_length", TORCH_BOX(&valid_kv_length));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(onnx_attn, CPU, m) { register_caches(m); }
STABLE_TORCH_LIBRARY_IMPL(onnx_attn, CUDA, m) { register_caches(m); }

}  // namespace onnx_attn
