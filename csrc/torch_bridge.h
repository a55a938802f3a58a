// torch_bridge.h: the only vocabulary through which the op files touch torch: views, allocation, messages and running a Problem.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include "launch.h"

namespace onnx_attn {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// Raises a Python RuntimeError. Messages read "argument: what is wrong, what is allowed", and nothing else: torch's own macro would
// put the path of a source file before them. The text is only built when the check fails.
#define ONNX_ATTN_CHECK(condition, ...)               \
  do {                                                \
    if (!(condition)) ::onnx_attn::fail(__VA_ARGS__); \
  } while (false)

std::string dtype_name(ScalarType type);       // "float16"
std::string shape_text(const Tensor& tensor);  // "[2, 4, 8, 64]"
int element_size(ScalarType type);             // bytes; 0 for a type that cannot be copied
bool is_floating(ScalarType type);             // one of the four floating types of Problem
ScalarType type_of(const Tensor& tensor);      // as Tensor::scalar_type, which makes a call for every type it compares with
DType dtype_of(const Tensor& tensor);          // for a type that Problem knows

void check_given(const Tensor& tensor, const char* name);  // None for a required tensor arrives as an undefined one
void check_same_device(const Tensor& tensor, const char* name, const Tensor& first, const char* first_name);

// Replaces a tensor whose last axis has a stride other than 1 by a contiguous copy.
void make_last_axis_unit(Tensor& tensor);

// Views of [batch, head, row, column] and of [batch, row, head * column] tensors.
Tensor4 view_bhsd(const Tensor& tensor);
Tensor4 view_bsh(const Tensor& tensor, int64_t column_count);

Tensor empty_contiguous(const Tensor& like, ScalarType type, std::initializer_list<int64_t> sizes);
// [batch, heads, rows, columns]; with `rows_outside_heads` stored as [batch, rows, heads, columns].
Tensor empty_bhsd(const Tensor& like, int64_t batch, int64_t heads, int64_t rows, int64_t columns, bool rows_outside_heads);

// Makes problem's keys and values, which are new rows so far, rows to be appended; the caller says to what.
void start_append(Problem& problem);
// Points problem at `past ++ new` in fresh tensors. The pasts, [batch, kv_heads, past_len, size] in the dtypes of K and V, are replaced by
// copies where their last axis is not contiguous.
struct Present {
  Tensor key, value;
};
Present append_to_past(Problem& problem, Tensor& past_key, Tensor& past_value);

// Reads counts that live on the CPU; never called for CUDA tensors.
int64_t count_at(const Tensor& counts, int64_t index);

// Makes the tensor's GPU current while it lives; does nothing for CPU tensors.
class __attribute__((visibility("hidden"))) DeviceScope {
 public:
  explicit DeviceScope(const Tensor& tensor);

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

// Plans and runs; `like` names the device. Outputs that `problem` points to are complete when the stream gets there.
void run(const Problem& problem, const Tensor& like);
void run(const Scatter& scatter, const Tensor& like);
void run(const ValidLength& problem, const Tensor& like);

}  // namespace onnx_attn
