// attention_op.cpp: ai.onnx::Attention (opsets 23 to 25): every check, in sentences, once; then a Problem.
#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>

#include "forward_only.h"
#include "written.h"

namespace onnx_attn {

namespace {

struct AttentionAttributes {
  bool is_causal = false;
  int64_t q_num_heads = 0;
  int64_t kv_num_heads = 0;
  std::optional<double> scale;
  double softcap = 0.0;
  std::optional<int64_t> softmax_precision;
  int64_t left_window_size = -1;
  int64_t right_window_size = -1;
};

// ONNX's float attributes are float32, and so is the arithmetic that uses them.
constexpr double kLargestFloat = std::numeric_limits<float>::max();
constexpr double kSmallestFloat = std::numeric_limits<float>::min();

void check_floating(const Tensor& tensor, const char* name) {
  check_given(tensor, name);
  ONNX_ATTN_CHECK(is_floating(type_of(tensor)), name, ": has dtype ", dtype_name(type_of(tensor)),
                  "; allowed are float16, bfloat16, float32 and float64");
}

void check_same_dtype(const Tensor& tensor, const char* name, const Tensor& other, const char* other_name) {
  ONNX_ATTN_CHECK(type_of(tensor) == type_of(other), name, ": has dtype ", dtype_name(type_of(tensor)), ", but ", other_name, " has ",
                  dtype_name(type_of(other)), "; the two must be the same");
}

void check_attributes(const AttentionAttributes& attributes) {
  if (attributes.scale) {
    ONNX_ATTN_CHECK(0 <= *attributes.scale && *attributes.scale <= kLargestFloat, "scale: is ", *attributes.scale,
                    "; it must be a finite float32 >= 0 (None means 1 / sqrt(head_size), 0 is a real scale)");
  }
  const bool caps = kSmallestFloat <= attributes.softcap && attributes.softcap <= kLargestFloat;
  ONNX_ATTN_CHECK(attributes.softcap == 0 || caps, "softcap: is ", attributes.softcap,
                  "; it must be >= 0 (0 means no softcap) and a finite, normal float32");
  if (attributes.softmax_precision) {
    const int64_t precision = *attributes.softmax_precision;
    ONNX_ATTN_CHECK(precision == 1 || precision == 10 || precision == 11 || precision == 16, "softmax_precision: is ", precision,
                    "; allowed are the ONNX types 1 (float), 10 (float16), 11 (double) and 16 (bfloat16)");
  }
  ONNX_ATTN_CHECK(attributes.left_window_size >= -1, "left_window_size: is ", attributes.left_window_size,
                  "; it must be >= -1 (-1 means no limit)");
  ONNX_ATTN_CHECK(attributes.right_window_size >= -1, "right_window_size: is ", attributes.right_window_size,
                  "; it must be >= -1 (-1 means no limit)");
  ONNX_ATTN_CHECK(attributes.q_num_heads >= 0, "q_num_heads: is ", attributes.q_num_heads, "; it must be >= 0 (0 means not given)");
  ONNX_ATTN_CHECK(attributes.kv_num_heads >= 0, "kv_num_heads: is ", attributes.kv_num_heads, "; it must be >= 0 (0 means not given)");
}

// Heads and head size of a 3-D tensor, whose last axis holds all heads.
int64_t columns_per_head(const Tensor& tensor, const char* name, int64_t heads, const char* heads_name) {
  ONNX_ATTN_CHECK(heads > 0, heads_name, ": is ", heads, "; a 3-D ", name, " of shape ", shape_text(tensor),
                  " needs a positive head count");
  ONNX_ATTN_CHECK(tensor.size(2) % heads == 0, name, ": last axis is ", tensor.size(2), ", which is not a multiple of ", heads_name, " = ",
                  heads);
  return tensor.size(2) / heads;
}

void check_heads_attribute(const char* name, int64_t attribute, const char* tensor_name, const Tensor& tensor) {
  ONNX_ATTN_CHECK(attribute == 0 || attribute == tensor.size(1), name, ": is ", attribute, ", but the 4-D ", tensor_name, " of shape ",
                  shape_text(tensor), " has ", tensor.size(1), " heads; leave it out for 4-D inputs");
}

void describe_3d(Problem& problem, const Tensor& Q, const Tensor& K, const Tensor& V, const AttentionAttributes& attributes) {
  problem.q_heads = attributes.q_num_heads;
  problem.kv_heads = attributes.kv_num_heads;
  problem.head_size = columns_per_head(Q, "Q", problem.q_heads, "q_num_heads");
  const int64_t k_head_size = columns_per_head(K, "K", problem.kv_heads, "kv_num_heads");
  problem.v_head_size = columns_per_head(V, "V", problem.kv_heads, "kv_num_heads");
  ONNX_ATTN_CHECK(k_head_size == problem.head_size, "K: has head size ", k_head_size, " (last axis ", K.size(2), " / kv_num_heads ",
                  problem.kv_heads, "), but Q has ", problem.head_size, " (", Q.size(2), " / q_num_heads ", problem.q_heads, ")");
  problem.q_len = Q.size(1);
  problem.kv_len = K.size(1);
  ONNX_ATTN_CHECK(V.size(1) == problem.kv_len, "V: has ", V.size(1), " rows, but K has ", problem.kv_len);
}

void describe_4d(Problem& problem, const Tensor& Q, const Tensor& K, const Tensor& V, const AttentionAttributes& attributes) {
  problem.q_heads = Q.size(1);
  problem.kv_heads = K.size(1);
  check_heads_attribute("q_num_heads", attributes.q_num_heads, "Q", Q);
  check_heads_attribute("kv_num_heads", attributes.kv_num_heads, "K", K);
  ONNX_ATTN_CHECK(V.size(1) == problem.kv_heads, "V: has ", V.size(1), " heads, but K has ", problem.kv_heads);
  problem.head_size = Q.size(3);
  problem.v_head_size = V.size(3);
  ONNX_ATTN_CHECK(K.size(3) == problem.head_size, "K: has head size ", K.size(3), ", but Q has ", problem.head_size);
  problem.q_len = Q.size(2);
  problem.kv_len = K.size(2);
  ONNX_ATTN_CHECK(V.size(2) == problem.kv_len, "V: has ", V.size(2), " rows, but K has ", problem.kv_len);
}

// Axis `from_right` of a right-aligned broadcast mask: its stride, 0 where the axis is absent or 1.
int64_t broadcast_stride(const Tensor& mask, int from_right, int64_t size, const char* axis_name) {
  const int64_t axis = mask.dim() - 1 - from_right;
  if (axis < 0) return 0;
  ONNX_ATTN_CHECK(mask.size(axis) == 1 || mask.size(axis) == size, "attn_mask: axis ", axis, " of shape ", shape_text(mask), " is ",
                  mask.size(axis), ", but there are ", size, " ", axis_name, "; it must be 1 or ", size);
  return mask.size(axis) == 1 ? 0 : mask.stride(axis);
}

bool is_integer(ScalarType type) {
  switch (type) {
    case ScalarType::Char:
    case ScalarType::Short:
    case ScalarType::Int:
    case ScalarType::Long:
    case ScalarType::Byte:
    case ScalarType::UInt16:
    case ScalarType::UInt32:
    case ScalarType::UInt64: return true;
    default: return false;
  }
}

// An integer mask is added like a float one. Expanded axes are narrowed first, so that the copy is no larger than what was stored.
Tensor integers_as_bias(const Tensor& mask, ScalarType type) {
  Tensor stored = mask;
  for (int64_t axis = 0; axis + 1 < mask.dim(); ++axis) {
    if (mask.size(axis) > 1 && mask.stride(axis) == 0) stored = torch::stable::narrow(stored, axis, 0, 1);
  }
  return torch::stable::to(stored, type);
}

void check_nonpad(const Problem& problem, const Tensor& nonpad, const Tensor& Q) {
  ONNX_ATTN_CHECK(type_of(nonpad) == ScalarType::Long, "nonpad_kv_seqlen: has dtype ", dtype_name(type_of(nonpad)), "; it must be int64");
  ONNX_ATTN_CHECK(nonpad.dim() == 1 && nonpad.size(0) == problem.batch, "nonpad_kv_seqlen: has shape ", shape_text(nonpad),
                  "; it must be [batch] = [", problem.batch, "]");
  check_same_device(nonpad, "nonpad_kv_seqlen", Q, "Q");
  if (!nonpad.is_cpu()) return;  // the device clamps: the host never reads it there
  for (int64_t entry = 0; entry < problem.batch; ++entry) {
    const int64_t length = count_at(nonpad, entry);
    ONNX_ATTN_CHECK(0 <= length && length <= problem.kv_len, "nonpad_kv_seqlen: entry ", entry, " is ", length, "; it must be in [0, ",
                    problem.kv_len, "], the number of keys");
  }
}

void describe_lengths(Problem& problem, const Tensor& counts, int64_t addend) {
  problem.mask.lengths = Lengths{counts.const_data_ptr(), dtype_of(counts), counts.stride(0), addend};
  problem.mask.offset_follows_length = true;
}

// `rows`: past_len, or the capacity of a cache. `columns`: head_size or v_head_size.
struct PastAxes {
  const char* rows;
  const char* columns;
};

void check_past(const Problem& problem, const Tensor& past, const char* name, const Tensor& incoming, const char* incoming_name,
                int64_t columns, const PastAxes& axes, const Tensor& Q) {
  check_same_device(past, name, Q, "Q");
  check_same_dtype(past, name, incoming, incoming_name);
  const bool fits = past.dim() == 4 && past.size(0) == problem.batch && past.size(1) == problem.kv_heads && past.size(3) == columns;
  ONNX_ATTN_CHECK(fits, name, ": has shape ", shape_text(past), "; it must be [batch, kv_heads, ", axes.rows, ", ", axes.columns, "] = [",
                  problem.batch, ", ", problem.kv_heads, ", ", axes.rows, ", ", columns, "]");
}

// Fills problem's sizes, dtypes, scale, softcap and window from Q, K, V and the attributes, checking each. Q, K and V are replaced
// by copies where their last axis is not contiguous; problem.q is set, K and V are left to the caller. kv_len is set to K's rows.
void describe_inputs(Problem& problem, Tensor& Q, Tensor& K, Tensor& V, const AttentionAttributes& attributes) {
  check_floating(Q, "Q");
  check_floating(K, "K");
  check_floating(V, "V");
  check_same_dtype(K, "K", Q, "Q");
  check_same_device(K, "K", Q, "Q");
  check_same_device(V, "V", Q, "Q");
  check_attributes(attributes);
  ONNX_ATTN_CHECK(Q.dim() == 3 || Q.dim() == 4, "Q: has shape ", shape_text(Q),
                  "; it must be 3-D [batch, q_len, q_heads * head_size] or 4-D [batch, q_heads, q_len, head_size]");
  ONNX_ATTN_CHECK(K.dim() == Q.dim(), "K: has shape ", shape_text(K), "; it must be ", Q.dim(), "-D like Q");
  ONNX_ATTN_CHECK(V.dim() == Q.dim(), "V: has shape ", shape_text(V), "; it must be ", Q.dim(), "-D like Q");
  problem.batch = Q.size(0);
  ONNX_ATTN_CHECK(K.size(0) == problem.batch, "K: has batch ", K.size(0), ", but Q has ", problem.batch);
  ONNX_ATTN_CHECK(V.size(0) == problem.batch, "V: has batch ", V.size(0), ", but Q has ", problem.batch);
  if (Q.dim() == 3) {
    describe_3d(problem, Q, K, V, attributes);
  } else {
    describe_4d(problem, Q, K, V, attributes);
  }
  ONNX_ATTN_CHECK(problem.head_size > 0, "Q: has head size 0; it must be at least 1");
  ONNX_ATTN_CHECK(problem.v_head_size > 0, "V: has head size 0; it must be at least 1");
  ONNX_ATTN_CHECK(problem.kv_heads > 0 ? problem.q_heads % problem.kv_heads == 0 : problem.q_heads == 0, "Q: has ", problem.q_heads,
                  " heads, which is not a multiple of the ", problem.kv_heads, " heads of K and V");

  problem.dtype = dtype_of(Q);
  problem.v_dtype = dtype_of(V);
  problem.compute = problem.dtype == DType::f64 || attributes.softmax_precision == 11 ? DType::f64 : DType::f32;
  problem.scale = attributes.scale ? *attributes.scale : 1.0 / std::sqrt(static_cast<double>(problem.head_size));
  problem.softcap = attributes.softcap;
  problem.mask.left = std::min(attributes.left_window_size, kLargestWindow);
  problem.mask.right = attributes.is_causal ? 0 : std::min(attributes.right_window_size, kLargestWindow);

  make_last_axis_unit(Q);
  make_last_axis_unit(K);
  make_last_axis_unit(V);
  problem.q = Q.dim() == 3 ? view_bsh(Q, problem.head_size) : view_bhsd(Q);
}

// K and V as views of [batch, kv_heads, rows, columns], whatever their rank.
Tensor4 view_keys(const Problem& problem, const Tensor& K) { return K.dim() == 3 ? view_bsh(K, problem.head_size) : view_bhsd(K); }

Tensor4 view_values(const Problem& problem, const Tensor& V) { return V.dim() == 3 ? view_bsh(V, problem.v_head_size) : view_bhsd(V); }

// Checks attn_mask against [batch, q_heads, q_len, kv_len] and points problem's tensor mask at it. `mask` keeps a converted copy alive.
void describe_attn_mask(Problem& problem, OptionalTensor& mask, const Tensor& Q) {
  if (!mask) return;
  const ScalarType type = type_of(*mask);
  ONNX_ATTN_CHECK(type == ScalarType::Bool || is_floating(type) || is_integer(type), "attn_mask: has dtype ", dtype_name(type),
                  "; allowed are bool (true keeps), floating and integer types (added to the scores)");
  check_same_device(*mask, "attn_mask", Q, "Q");
  const int64_t rank = mask->dim();
  ONNX_ATTN_CHECK(1 <= rank && rank <= 4, "attn_mask: has rank ", rank,
                  "; it must have 1 to 4 axes, aligned right to [batch, q_heads, q_len, kv_len]");
  ONNX_ATTN_CHECK(mask->size(rank - 1) <= problem.kv_len, "attn_mask: last axis is ", mask->size(rank - 1), ", but there are ",
                  problem.kv_len, " keys; it may be shorter (the rest is not allowed), never longer");
  if (is_integer(type)) mask = integers_as_bias(*mask, problem.compute == DType::f64 ? ScalarType::Double : ScalarType::Float);

  TensorMask& tensor = problem.mask.tensor;
  tensor.kind = type == ScalarType::Bool ? TensorMask::Kind::keep : TensorMask::Kind::bias;
  tensor.dtype = dtype_of(*mask);
  tensor.data = mask->const_data_ptr();
  tensor.columns = mask->size(rank - 1);
  tensor.key_stride = tensor.columns > 1 ? mask->stride(rank - 1) : 1;
  tensor.query_stride = broadcast_stride(*mask, 1, problem.q_len, "queries");
  tensor.head_stride = broadcast_stride(*mask, 2, problem.q_heads, "query heads");
  tensor.batch_stride = broadcast_stride(*mask, 3, problem.batch, "batch entries");
}

// Y: 3-D like a 3-D Q, else 4-D in Q's axis order. Points problem.y at it.
Tensor allocate_output(Problem& problem, const Tensor& Q) {
  if (Q.dim() == 3) {
    Tensor Y = empty_contiguous(Q, type_of(Q), {problem.batch, problem.q_len, problem.q_heads * problem.v_head_size});
    problem.y = view_bsh(Y, problem.v_head_size);
    return Y;
  }
  Tensor Y = empty_bhsd(Q, problem.batch, problem.q_heads, problem.q_len, problem.v_head_size, Q.stride(1) < Q.stride(2));
  problem.y = view_bhsd(Y);
  return Y;
}

struct Outputs {  // a Tensor that nobody gives would be allocated, too
  OptionalTensor Y, present_key, present_value, scores, lse;
};

struct Request {
  OptionalTensor past_key, past_value;
  bool has_past = false;
  std::optional<int64_t> score_mode;
  bool has_lse = false;
};

// Points the Problem at `past ++ new`, written to fresh tensors that become the call's outputs.
void describe_past(Problem& problem, const Tensor& Q, const Tensor& K, const Tensor& V, Request& request, Outputs& outputs) {
  ONNX_ATTN_CHECK(request.past_value.has_value(), "past_value: is missing; past_key and past_value must be given together");
  check_past(problem, *request.past_key, "past_key", K, "K", problem.head_size, {"past_len", "head_size"}, Q);
  check_past(problem, *request.past_value, "past_value", V, "V", problem.v_head_size, {"past_len", "v_head_size"}, Q);
  const int64_t past_len = request.past_key->size(2);
  ONNX_ATTN_CHECK(request.past_value->size(2) == past_len, "past_value: has ", request.past_value->size(2), " rows, but past_key has ",
                  past_len);
  problem.mask.offset = past_len;
  Present present = append_to_past(problem, *request.past_key, *request.past_value);
  outputs.present_key = std::move(present.key);
  outputs.present_value = std::move(present.value);
}

Outputs attend(Tensor Q, Tensor K, Tensor V, OptionalTensor attn_mask, const OptionalTensor& nonpad_kv_seqlen, Request request,
               const AttentionAttributes& attributes) {
  Problem problem;
  Outputs outputs;
  describe_inputs(problem, Q, K, V, attributes);
  const DeviceScope scope(Q);
  problem.k = view_keys(problem, K);
  problem.v = view_values(problem, V);
  if (request.has_past) {
    ONNX_ATTN_CHECK(!nonpad_kv_seqlen.has_value(), "nonpad_kv_seqlen: cannot be combined with past_key and past_value");
    describe_past(problem, Q, K, V, request, outputs);
  }
  if (nonpad_kv_seqlen) {
    check_nonpad(problem, *nonpad_kv_seqlen, Q);
    describe_lengths(problem, *nonpad_kv_seqlen, 0);
  }
  describe_attn_mask(problem, attn_mask, Q);
  if (request.score_mode) {
    ONNX_ATTN_CHECK(0 <= *request.score_mode && *request.score_mode <= 3, "qk_matmul_output_mode: is ", *request.score_mode,
                    "; allowed are 0 (scaled product), 1 (after softcap), 2 (after mask) and 3 (after softmax)");
    problem.score_mode = static_cast<ScoreMode>(*request.score_mode);
    outputs.scores = empty_contiguous(Q, type_of(Q), {problem.batch, problem.q_heads, problem.q_len, problem.kv_len});
    problem.scores = outputs.scores->mutable_data_ptr();
  }
  if (request.has_lse) {
    outputs.lse = empty_contiguous(Q, ScalarType::Float, {problem.batch, problem.q_heads, problem.q_len});
    problem.lse = static_cast<float*>(outputs.lse->mutable_data_ptr());
  }
  outputs.Y = allocate_output(problem, Q);
  run(problem, Q);
  return outputs;
}

// ---------------------------------------------------------------------------------------------- overloads

#define ATTRIBUTE_PARAMETERS                                                                              \
  bool is_causal, int64_t q_num_heads, int64_t kv_num_heads, std::optional<double> scale, double softcap, \
      std::optional<int64_t> softmax_precision, int64_t left_window_size, int64_t right_window_size
#define ATTRIBUTES \
  AttentionAttributes { is_causal, q_num_heads, kv_num_heads, scale, softcap, softmax_precision, left_window_size, right_window_size }

Tensor attention(const Tensor& Q, const Tensor& K, const Tensor& V, const OptionalTensor& attn_mask, const OptionalTensor& nonpad_kv_seqlen,
                 ATTRIBUTE_PARAMETERS) {
  return attend(Q, K, V, attn_mask, nonpad_kv_seqlen, Request{}, ATTRIBUTES).Y.value();
}

std::tuple<Tensor, Tensor, Tensor> attention_kv(const Tensor& Q, const Tensor& K, const Tensor& V, const OptionalTensor& attn_mask,
                                                const Tensor& past_key, const OptionalTensor& past_value,
                                                const OptionalTensor& nonpad_kv_seqlen, ATTRIBUTE_PARAMETERS) {
  Outputs outputs = attend(Q, K, V, attn_mask, nonpad_kv_seqlen, Request{past_key, past_value, true}, ATTRIBUTES);
  return {*outputs.Y, *outputs.present_key, *outputs.present_value};
}

std::tuple<Tensor, Tensor> attention_qk(const Tensor& Q, const Tensor& K, const Tensor& V, const OptionalTensor& attn_mask,
                                        const OptionalTensor& nonpad_kv_seqlen, int64_t qk_matmul_output_mode, ATTRIBUTE_PARAMETERS) {
  Request request;
  request.score_mode = qk_matmul_output_mode;
  Outputs outputs = attend(Q, K, V, attn_mask, nonpad_kv_seqlen, request, ATTRIBUTES);
  return {*outputs.Y, *outputs.scores};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_kv_qk(const Tensor& Q, const Tensor& K, const Tensor& V,
                                                           const OptionalTensor& attn_mask, const Tensor& past_key,
                                                           const OptionalTensor& past_value, const OptionalTensor& nonpad_kv_seqlen,
                                                           int64_t qk_matmul_output_mode, ATTRIBUTE_PARAMETERS) {
  Outputs outputs = attend(Q, K, V, attn_mask, nonpad_kv_seqlen, Request{past_key, past_value, true, qk_matmul_output_mode}, ATTRIBUTES);
  return {*outputs.Y, *outputs.present_key, *outputs.present_value, *outputs.scores};
}

std::tuple<Tensor, Tensor> attention_lse(const Tensor& Q, const Tensor& K, const Tensor& V, const OptionalTensor& attn_mask,
                                         const OptionalTensor& nonpad_kv_seqlen, bool return_lse, ATTRIBUTE_PARAMETERS) {
  ONNX_ATTN_CHECK(return_lse, "return_lse: is false; this overload returns the log-sum-exp, leave the argument out for Y alone");
  Request request;
  request.has_lse = true;
  Outputs outputs = attend(Q, K, V, attn_mask, nonpad_kv_seqlen, request, ATTRIBUTES);
  return {*outputs.Y, *outputs.lse};
}

// Writes K and V at rows [cache_lengths[b], + new rows) of the caches, then attends to everything up to there.
Tensor attention_cached(Tensor Q, Tensor K, Tensor V, const Tensor& key_cache, const Tensor& value_cache, const Tensor& cache_lengths,
                        OptionalTensor attn_mask, ATTRIBUTE_PARAMETERS) {
  check_no_gradient(key_cache, "key_cache");
  check_no_gradient(value_cache, "value_cache");
  Problem problem;
  describe_inputs(problem, Q, K, V, ATTRIBUTES);
  const DeviceScope scope(Q);
  check_past(problem, key_cache, "key_cache", K, "K", problem.head_size, {"capacity", "head_size"}, Q);
  check_past(problem, value_cache, "value_cache", V, "V", problem.v_head_size, {"capacity", "v_head_size"}, Q);
  const int64_t capacity = key_cache.size(2);
  ONNX_ATTN_CHECK(value_cache.size(2) == capacity, "value_cache: has ", value_cache.size(2), " rows, but key_cache has ", capacity);
  check_same_device(cache_lengths, "cache_lengths", Q, "Q");
  ONNX_ATTN_CHECK(type_of(cache_lengths) == ScalarType::Long || type_of(cache_lengths) == ScalarType::Int, "cache_lengths: has dtype ",
                  dtype_name(type_of(cache_lengths)), "; it must be int64 or int32");
  ONNX_ATTN_CHECK(cache_lengths.dim() == 1 && cache_lengths.size(0) == problem.batch, "cache_lengths: has shape ",
                  shape_text(cache_lengths), "; it must be [batch] = [", problem.batch, "]");
  const int64_t new_len = problem.kv_len;
  ONNX_ATTN_CHECK(new_len <= capacity, "K: has ", new_len, " rows, but the caches hold only ", capacity);
  if (cache_lengths.is_cpu()) {
    for (int64_t entry = 0; entry < problem.batch; ++entry) {
      const int64_t length = count_at(cache_lengths, entry);
      ONNX_ATTN_CHECK(0 <= length && length <= capacity - new_len, "cache_lengths: entry ", entry, " is ", length, "; with ", new_len,
                      " new rows it must be in [0, ", capacity - new_len, "] for a cache of ", capacity, " rows");
    }
  }

  problem.k = view_keys(problem, K);
  problem.v = view_values(problem, V);
  start_append(problem);
  problem.append.first_row = Lengths{cache_lengths.const_data_ptr(), dtype_of(cache_lengths), cache_lengths.stride(0), 0};
  problem.kv_len = capacity;
  problem.k = view_bhsd(key_cache);
  problem.v = view_bhsd(value_cache);
  describe_lengths(problem, cache_lengths, new_len);
  describe_attn_mask(problem, attn_mask, Q);
  check_written_caches({key_cache, "key_cache"}, {value_cache, "value_cache"},
                       {{Q, "Q"}, {K, "K"}, {V, "V"}, {cache_lengths, "cache_lengths"}, {attn_mask, "attn_mask"}});
  Tensor Y = allocate_output(problem, Q);
  run(problem, Q);
  count_write(key_cache);
  count_write(value_cache);
  return Y;
}

void register_attention(torch::stable::detail::StableLibrary& m) {
  m.impl("attention", TORCH_BOX(&ForwardOnly<&attention>::call));
  m.impl("attention.kv", TORCH_BOX(&ForwardOnly<&attention_kv>::call));
  m.impl("attention.qk", TORCH_BOX(&ForwardOnly<&attention_qk>::call));
  m.impl("attention.kv_qk", TORCH_BOX(&ForwardOnly<&attention_kv_qk>::call));
  m.impl("attention.lse", TORCH_BOX(&ForwardOnly<&attention_lse>::call));
  m.impl("attention_cached", TORCH_BOX(&ForwardOnly<&attention_cached>::call));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(onnx_attn, CPU, m) { register_attention(m); }
STABLE_TORCH_LIBRARY_IMPL(onnx_attn, CUDA, m) { register_attention(m); }

}  // namespace onnx_attn
