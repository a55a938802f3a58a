// written.cpp: the checks of written.h, with a few comparisons for each argument: they are made on every call.
#include "written.h"

namespace onnx_attn {

namespace {

// From the first byte that a tensor can reach to behind the last one.
struct Span {
  const char* begin = nullptr;
  const char* end = nullptr;

  bool meets(const Span& other) const { return begin < other.end && other.begin < end; }  // an empty span meets none
};

Span span_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  int64_t last = 0;
  for (size_t axis = 0; axis < sizes.size(); ++axis) {
    if (sizes[axis] == 0) return Span{};
    last += (sizes[axis] - 1) * strides[axis];
  }
  const char* begin = static_cast<const char*>(tensor.const_data_ptr());
  return Span{begin, begin + (last + 1) * element_size(type_of(tensor))};
}

// Every axis must step over all that the axes of smaller strides span. That allows any order of axes and gaps of any size, so all
// that slicing and transposing make; of tensors whose axes interleave it refuses some whose elements would not meet.
void check_own_memory(const NamedTensor& written) {
  const auto sizes = written.tensor->sizes(), strides = written.tensor->strides();
  size_t axes[kMaxScatterRank];  // longer than 1, by stride
  size_t count = 0;
  for (size_t axis = 0; axis < sizes.size(); ++axis) {
    if (sizes[axis] == 0) return;
    if (sizes[axis] == 1) continue;
    size_t place = count++;
    for (; place > 0 && strides[axes[place - 1]] > strides[axis]; --place) axes[place] = axes[place - 1];
    axes[place] = axis;
  }
  int64_t reach = 0;
  for (size_t i = 0; i < count; ++i) {
    const size_t axis = axes[i];
    ONNX_ATTN_CHECK(strides[axis] > reach, written.name, ": is written in place, but axis ", axis, " has stride ", strides[axis],
                    strides[axis] == 0 ? " (it is expanded)" : "", ", so that elements of shape ", shape_text(*written.tensor),
                    " share memory or interleave; pass a tensor with storage of its own");
    reach += (sizes[axis] - 1) * strides[axis];
  }
}

void check_apart(const NamedTensor& written, const Span& span, const NamedTensor& other, const Span& other_span) {
  ONNX_ATTN_CHECK(!span.meets(other_span), other.name, ": overlaps ", written.name,
                  ", which is written in place, in the memory that the two span; they must be different storage");
}

}  // namespace

void check_written(const NamedTensor& written, std::initializer_list<NamedTensor> read) {
  check_own_memory(written);
  const Span span = span_of(*written.tensor);
  for (const NamedTensor& other : read) {
    if (other.tensor) check_apart(written, span, other, span_of(*other.tensor));
  }
}

void check_written_caches(const NamedTensor& keys, const NamedTensor& values, std::initializer_list<NamedTensor> read) {
  for (const auto& [cache, name] : {keys, values}) {
    ONNX_ATTN_CHECK(cache->size(3) == 1 || cache->stride(3) == 1, name, ": last axis has stride ", cache->stride(3), "; it must be 1");
  }
  check_own_memory(keys);
  check_own_memory(values);
  const Span keys_span = span_of(*keys.tensor), values_span = span_of(*values.tensor);
  check_apart(keys, keys_span, values, values_span);
  for (const NamedTensor& other : read) {
    if (!other.tensor) continue;
    const Span span = span_of(*other.tensor);
    check_apart(keys, keys_span, other, span);
    check_apart(values, values_span, other, span);
  }
}

}  // namespace onnx_attn
