// written.h: what is asked of an argument that is written in place: each element in memory of its own, and nothing else there.
#pragma once

#include <initializer_list>

#include "torch_bridge.h"

namespace onnx_attn {

struct NamedTensor {
  NamedTensor(const Tensor& tensor, const char* name) : tensor(&tensor), name(name) {}
  NamedTensor(const OptionalTensor& tensor, const char* name) : tensor(tensor ? &*tensor : nullptr), name(name) {}

  const Tensor* tensor;  // null: not given
  const char* name;
};

// Refuses elements that share memory, and `read` tensors that reach between the first and the last element of the written one.
void check_written(const NamedTensor& written, std::initializer_list<NamedTensor> read);

// The same for a pair of 4-D caches, which must also be apart from one another and have unit last axes.
void check_written_caches(const NamedTensor& keys, const NamedTensor& values, std::initializer_list<NamedTensor> read);

}  // namespace onnx_attn
