// torch_bridge.cpp: allocation, views and messages through torch's stable ABI.
#include "torch_bridge.h"

#include <algorithm>

namespace onnx_attn {

std::string dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Double: return "float64";
    case ScalarType::Float: return "float32";
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Bool: return "bool";
    case ScalarType::Char: return "int8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Byte: return "uint8";
    case ScalarType::UInt16: return "uint16";
    case ScalarType::UInt32: return "uint32";
    case ScalarType::UInt64: return "uint64";
    case ScalarType::ComplexFloat: return "complex64";
    case ScalarType::ComplexDouble: return "complex128";
    default: return "dtype number " + std::to_string(static_cast<int>(type));
  }
}

std::string shape_text(const Tensor& tensor) {
  std::string text = "[";
  for (int64_t axis = 0; axis < tensor.dim(); ++axis) text += (axis ? ", " : "") + std::to_string(tensor.size(axis));
  return text + "]";
}

int element_size(ScalarType type) {
  switch (type) {
    case ScalarType::Bool:
    case ScalarType::Char:
    case ScalarType::Byte:
    case ScalarType::Float8_e5m2:
    case ScalarType::Float8_e4m3fn:
    case ScalarType::Float8_e5m2fnuz:
    case ScalarType::Float8_e4m3fnuz: return 1;
    case ScalarType::Half:
    case ScalarType::BFloat16:
    case ScalarType::Short:
    case ScalarType::UInt16: return 2;
    case ScalarType::Float:
    case ScalarType::Int:
    case ScalarType::UInt32:
    case ScalarType::ComplexHalf: return 4;
    case ScalarType::Double:
    case ScalarType::Long:
    case ScalarType::UInt64:
    case ScalarType::ComplexFloat: return 8;
    case ScalarType::ComplexDouble: return 16;
    default: return 0;
  }
}

ScalarType type_of(const Tensor& tensor) {
  struct Codes {
    int32_t half = aoti_torch_dtype_float16(), brain = aoti_torch_dtype_bfloat16(), single = aoti_torch_dtype_float32();
  };
  static const Codes codes;
  int32_t code = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
  if (code == codes.half) return ScalarType::Half;
  if (code == codes.brain) return ScalarType::BFloat16;
  if (code == codes.single) return ScalarType::Float;
  return tensor.scalar_type();
}

bool is_floating(ScalarType type) {
  return type == ScalarType::Double || type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16;
}

DType dtype_of(const Tensor& tensor) {
  switch (type_of(tensor)) {
    case ScalarType::Double: return DType::f64;
    case ScalarType::Float: return DType::f32;
    case ScalarType::Half: return DType::f16;
    case ScalarType::BFloat16: return DType::bf16;
    case ScalarType::Bool: return DType::boolean;
    case ScalarType::Int: return DType::i32;
    case ScalarType::Long: return DType::i64;
    default: fail("onnx_attn: no kernel reads ", dtype_name(type_of(tensor)));
  }
}

void check_given(const Tensor& tensor, const char* name) {
  ONNX_ATTN_CHECK(tensor.get() && tensor.defined(), name, ": is None; a tensor is required");
}

static int32_t device_type_of(const Tensor& tensor) {
  int32_t type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  return type;
}

void check_same_device(const Tensor& tensor, const char* name, const Tensor& first, const char* first_name) {
  check_given(tensor, name);
  const int32_t type = device_type_of(tensor);
  const bool same =
      type == device_type_of(first) && (type == aoti_torch_device_type_cpu() || tensor.get_device_index() == first.get_device_index());
  const auto place = [](const Tensor& t) { return t.is_cuda() ? "cuda:" + std::to_string(t.get_device_index()) : std::string("cpu"); };
  ONNX_ATTN_CHECK(same, name, ": is on ", place(tensor), ", but ", first_name, " is on ", place(first),
                  "; all tensors must be on one device");
}

void make_last_axis_unit(Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  if (tensor.stride(last) != 1 && tensor.size(last) > 1) tensor = torch::stable::contiguous(tensor);
}

Tensor4 view_bhsd(const Tensor& tensor) {
  return Tensor4{const_cast<void*>(tensor.const_data_ptr()), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

Tensor4 view_bsh(const Tensor& tensor, int64_t column_count) {
  return Tensor4{const_cast<void*>(tensor.const_data_ptr()), tensor.stride(0), column_count, tensor.stride(1)};
}

static Tensor empty_strided(const Tensor& like, ScalarType type, const int64_t* sizes, const int64_t* strides, int64_t rank) {
  AtenTensorHandle handle = nullptr;
  const int32_t device_type = device_type_of(like);
  const int32_t device_index = device_type == aoti_torch_device_type_cpu() ? 0 : like.get_device_index();
  const AOTITorchError error =
      aoti_torch_empty_strided(rank, sizes, strides, static_cast<int32_t>(type), device_type, device_index, &handle);
  if (error != AOTI_TORCH_SUCCESS) {
    std::string shape;
    for (int64_t axis = 0; axis < rank; ++axis) shape += (axis ? ", " : "") + std::to_string(sizes[axis]);
    fail("onnx_attn: out of memory: no room for an output or workspace of shape [", shape, "] and type ", dtype_name(type));
  }
  return Tensor(handle);
}

Tensor empty_contiguous(const Tensor& like, ScalarType type, std::initializer_list<int64_t> sizes) {
  int64_t strides[8];
  int64_t stride = 1;
  for (int axis = static_cast<int>(sizes.size()) - 1; axis >= 0; --axis) {
    strides[axis] = stride;
    stride *= std::max<int64_t>(sizes.begin()[axis], 1);
  }
  return empty_strided(like, type, sizes.begin(), strides, static_cast<int64_t>(sizes.size()));
}

Tensor empty_bhsd(const Tensor& like, int64_t batch, int64_t heads, int64_t rows, int64_t columns, bool rows_outside_heads) {
  if (!rows_outside_heads) return empty_contiguous(like, type_of(like), {batch, heads, rows, columns});
  // As torch strides an empty [batch, rows, heads, columns] tensor and transposes it: a size of 0 counts as 1.
  const int64_t row_stride = std::max<int64_t>(heads, 1) * std::max<int64_t>(columns, 1);
  const int64_t sizes[] = {batch, heads, rows, columns};
  const int64_t strides[] = {std::max<int64_t>(rows, 1) * row_stride, std::max<int64_t>(columns, 1), row_stride, 1};
  return empty_strided(like, type_of(like), sizes, strides, 4);
}

void start_append(Problem& problem) {
  Append& append = problem.append;
  append.active = true;
  append.new_k = problem.k;
  append.new_v = problem.v;
  append.new_len = problem.kv_len;
}

Present append_to_past(Problem& problem, Tensor& past_key, Tensor& past_value) {
  make_last_axis_unit(past_key);
  make_last_axis_unit(past_value);
  start_append(problem);
  problem.append.past_k = view_bhsd(past_key);
  problem.append.past_v = view_bhsd(past_value);
  problem.append.past_len = past_key.size(2);
  problem.kv_len += problem.append.past_len;
  const auto make_present = [&](const Tensor& past, int64_t columns) {
    return empty_contiguous(past, type_of(past), {problem.batch, problem.kv_heads, problem.kv_len, columns});
  };
  Present present{make_present(past_key, problem.head_size), make_present(past_value, problem.v_head_size)};
  problem.k = view_bhsd(present.key);
  problem.v = view_bhsd(present.value);
  return present;
}

int64_t count_at(const Tensor& counts, int64_t index) {
  const int64_t offset = counts.dim() == 0 ? 0 : index * counts.stride(0);
  return type_of(counts) == ScalarType::Long ? static_cast<const int64_t*>(counts.const_data_ptr())[offset]
                                             : static_cast<const int32_t*>(counts.const_data_ptr())[offset];
}

DeviceScope::DeviceScope(const Tensor& tensor) {
  if (tensor.is_cuda()) guard_.emplace(tensor.get_device_index());
}

}  // namespace onnx_attn
