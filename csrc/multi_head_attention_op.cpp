// multi_head_attention_op.cpp: com.microsoft::MultiHeadAttention: every check, in sentences, once; then a Problem.
#include <cmath>
#include <tuple>
#include <utility>

#include "forward_only.h"
#include "written.h"

namespace onnx_attn {

namespace {

struct Inputs {
  Tensor query;
  OptionalTensor key, value, bias, key_padding_mask, attention_bias;
};

struct MhaAttributes {
  int64_t num_heads = 0;
  double scale = 0.0;
  double mask_filter_value = -10000.0;
  bool unidirectional = false;
};

// How query, key and value arrive; N heads of size H.
enum class Layout {
  separate,    // query [B, S, N * H], key [B, L, N * H], value [B, L, N * Hv]
  bnsh_keys,   // query [B, S, N * H], key and value [B, N, L, H]
  packed_kv,   // query [B, S, N * H], key [B, L, N, 2, H]
  packed_qkv,  // query [B, S, N, 3, H]
};

void check_attributes(const MhaAttributes& attributes) {
  ONNX_ATTN_CHECK(attributes.num_heads > 0, "num_heads: is ", attributes.num_heads, "; it must be positive");
  ONNX_ATTN_CHECK(std::isfinite(attributes.scale), "scale: is ", attributes.scale, "; it must be finite (0 means 1 / sqrt(head_size))");
  ONNX_ATTN_CHECK(!std::isnan(attributes.mask_filter_value), "mask_filter_value: is NaN; it must be a number");
}

void check_like_query(const Tensor& tensor, const char* name, const Tensor& query) {
  check_given(tensor, name);
  ONNX_ATTN_CHECK(type_of(tensor) == type_of(query), name, ": has dtype ", dtype_name(type_of(tensor)), ", but query has ",
                  dtype_name(type_of(query)), "; the two must be the same");
  check_same_device(tensor, name, query, "query");
}

Layout find_layout(const Inputs& inputs) {
  check_given(inputs.query, "query");
  const int64_t query_rank = inputs.query.dim();
  if (query_rank == 5) {
    ONNX_ATTN_CHECK(!inputs.key, "key: must be absent with a packed 5-D query of shape ", shape_text(inputs.query));
    ONNX_ATTN_CHECK(!inputs.value, "value: must be absent with a packed 5-D query of shape ", shape_text(inputs.query));
    return Layout::packed_qkv;
  }
  ONNX_ATTN_CHECK(query_rank == 3, "query: has shape ", shape_text(inputs.query),
                  "; it must be [batch, q_len, hidden] or packed [batch, q_len, num_heads, 3, head_size]");
  ONNX_ATTN_CHECK(inputs.key.has_value(), "key: is missing; only a packed 5-D query goes without, this one has shape ",
                  shape_text(inputs.query));
  const int64_t key_rank = inputs.key->dim();
  if (key_rank == 5) {
    ONNX_ATTN_CHECK(!inputs.value, "value: must be absent with a packed 5-D key of shape ", shape_text(*inputs.key));
    return Layout::packed_kv;
  }
  ONNX_ATTN_CHECK(
      key_rank == 3 || key_rank == 4, "key: has shape ", shape_text(*inputs.key),
      "; it must be [batch, kv_len, hidden], [batch, num_heads, kv_len, head_size] or packed [batch, kv_len, num_heads, 2, head_size]");
  ONNX_ATTN_CHECK(inputs.value.has_value(), "value: is missing; it must be given with a key of shape ", shape_text(*inputs.key));
  ONNX_ATTN_CHECK(inputs.value->dim() == key_rank, "value: has shape ", shape_text(*inputs.value), "; it must be ", key_rank,
                  "-D like key of shape ", shape_text(*inputs.key));
  return key_rank == 3 ? Layout::separate : Layout::bnsh_keys;
}

// Component `index` of a packed [B, rows, N, components, H] tensor.
Tensor4 view_packed(const Tensor& packed, int64_t index) {
  const int64_t bytes = element_size(type_of(packed));
  char* data = static_cast<char*>(const_cast<void*>(packed.const_data_ptr()));
  return Tensor4{data + index * packed.stride(3) * bytes, packed.stride(0), packed.stride(2), packed.stride(1)};
}

void check_packed(const Tensor& packed, const char* name, int64_t batch, int64_t num_heads, int64_t components, int64_t head_size) {
  const bool fits = packed.size(0) == batch && packed.size(2) == num_heads && packed.size(3) == components && packed.size(4) == head_size;
  ONNX_ATTN_CHECK(fits, name, ": has shape ", shape_text(packed), "; packed it must be [batch, rows, num_heads, ", components,
                  ", head_size] = [", batch, ", rows, ", num_heads, ", ", components, ", ", head_size, "]");
}

int64_t split_hidden(const Tensor& tensor, const char* name, int64_t num_heads) {
  ONNX_ATTN_CHECK(tensor.size(2) % num_heads == 0, name, ": last axis is ", tensor.size(2),
                  ", which is not a multiple of num_heads = ", num_heads);
  return tensor.size(2) / num_heads;
}

void describe_separate(Problem& problem, Inputs& inputs, const MhaAttributes& attributes) {
  const Tensor &key = *inputs.key, &value = *inputs.value;
  ONNX_ATTN_CHECK(key.size(2) == inputs.query.size(2), "key: last axis is ", key.size(2), ", but query has ", inputs.query.size(2));
  problem.kv_len = key.size(1);
  ONNX_ATTN_CHECK(value.size(1) == problem.kv_len, "value: has ", value.size(1), " rows, but key has ", problem.kv_len);
  problem.v_head_size = split_hidden(value, "value", attributes.num_heads);
  problem.k = view_bsh(key, problem.head_size);
  problem.v = view_bsh(value, problem.v_head_size);
}

void describe_bnsh_keys(Problem& problem, Inputs& inputs, const MhaAttributes& attributes) {
  const Tensor &key = *inputs.key, &value = *inputs.value;
  ONNX_ATTN_CHECK(key.size(1) == attributes.num_heads, "key: has ", key.size(1), " heads in shape ", shape_text(key), ", but num_heads is ",
                  attributes.num_heads);
  ONNX_ATTN_CHECK(key.size(3) == problem.head_size, "key: has head size ", key.size(3), ", but query has ", problem.head_size);
  problem.kv_len = key.size(2);
  for (int axis = 0; axis < 4; ++axis) {
    ONNX_ATTN_CHECK(value.size(axis) == key.size(axis), "value: has shape ", shape_text(value), "; a 4-D value must have key's shape ",
                    shape_text(key));
  }
  problem.v_head_size = problem.head_size;
  problem.k = view_bhsd(key);
  problem.v = view_bhsd(value);
}

// Sizes and views of query, key and value. Copies replace tensors whose last axis is not contiguous.
void describe_inputs(Problem& problem, Inputs& inputs, Layout layout, const MhaAttributes& attributes) {
  Tensor& query = inputs.query;
  const ScalarType type = type_of(query);
  ONNX_ATTN_CHECK(type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16, "query: has dtype ",
                  dtype_name(type), "; com.microsoft::MultiHeadAttention allows float32, float16 and bfloat16 (float64: use attention)");
  if (inputs.key) check_like_query(*inputs.key, "key", query);
  if (inputs.value) check_like_query(*inputs.value, "value", query);
  check_attributes(attributes);

  const int64_t num_heads = attributes.num_heads;
  problem.dtype = problem.v_dtype = dtype_of(query);
  problem.batch = query.size(0);
  problem.q_heads = problem.kv_heads = num_heads;
  problem.q_len = query.size(1);
  problem.head_size = layout == Layout::packed_qkv ? query.size(4) : split_hidden(query, "query", num_heads);
  ONNX_ATTN_CHECK(problem.head_size > 0, "query: has head size 0 in shape ", shape_text(query), "; it must be at least 1");
  make_last_axis_unit(query);
  if (inputs.key) {
    ONNX_ATTN_CHECK(inputs.key->size(0) == problem.batch, "key: has batch ", inputs.key->size(0), ", but query has ", problem.batch);
    make_last_axis_unit(*inputs.key);
  }
  if (inputs.value) {
    ONNX_ATTN_CHECK(inputs.value->size(0) == problem.batch, "value: has batch ", inputs.value->size(0), ", but query has ", problem.batch);
    make_last_axis_unit(*inputs.value);
  }

  switch (layout) {
    case Layout::separate: describe_separate(problem, inputs, attributes); break;
    case Layout::bnsh_keys: describe_bnsh_keys(problem, inputs, attributes); break;
    case Layout::packed_kv:
      check_packed(*inputs.key, "key", problem.batch, num_heads, 2, problem.head_size);
      problem.kv_len = inputs.key->size(1);
      problem.v_head_size = problem.head_size;
      problem.k = view_packed(*inputs.key, 0);
      problem.v = view_packed(*inputs.key, 1);
      break;
    case Layout::packed_qkv:
      check_packed(query, "query", problem.batch, num_heads, 3, problem.head_size);
      problem.kv_len = problem.q_len;
      problem.v_head_size = problem.head_size;
      problem.k = view_packed(query, 1);
      problem.v = view_packed(query, 2);
      break;
  }
  ONNX_ATTN_CHECK(problem.v_head_size > 0, "value: has head size 0; it must be at least 1");
  problem.q = layout == Layout::packed_qkv ? view_packed(query, 0) : view_bsh(query, problem.head_size);
  problem.scale = attributes.scale == 0.0 ? 1.0 / std::sqrt(static_cast<double>(problem.head_size)) : attributes.scale;
}

// [D + D + Dv]; with BNSH keys only the query's segment acts, as key and value are taken to be projected already.
void describe_bias(Problem& problem, OptionalTensor& bias, Layout layout, const Tensor& query) {
  if (!bias) return;
  ONNX_ATTN_CHECK(layout != Layout::packed_kv, "bias: cannot be combined with a packed 5-D key");
  check_like_query(*bias, "bias", query);
  const int64_t hidden = problem.q_heads * problem.head_size, v_hidden = problem.kv_heads * problem.v_head_size;
  ONNX_ATTN_CHECK(bias->dim() == 1 && bias->size(0) == 2 * hidden + v_hidden, "bias: has shape ", shape_text(*bias),
                  "; it must be [hidden + hidden + v_hidden] = [", 2 * hidden + v_hidden, "]");
  bias = torch::stable::contiguous(*bias);
  const int64_t bytes = element_size(type_of(*bias));
  const char* data = static_cast<const char*>(bias->const_data_ptr());
  problem.q_bias = data;
  if (layout == Layout::bnsh_keys) return;
  problem.k_bias = data + hidden * bytes;
  problem.v_bias = data + 2 * hidden * bytes;
}

// Widths that a mask over the keys may have: exactly kv_len, or for a shared cache anything from what is in use to its capacity.
struct KeyWidths {
  int64_t least = 0;
  int64_t most = 0;
  bool contains(int64_t width) const { return least <= width && width <= most; }
  std::string text() const { return least == most ? std::to_string(least) : std::to_string(least) + " to " + std::to_string(most); }
};

void describe_padding(Problem& problem, OptionalTensor& mask, const KeyWidths& widths, double filter, const Tensor& query) {
  if (!mask) return;
  const ScalarType type = type_of(*mask);
  ONNX_ATTN_CHECK(type == ScalarType::Int || type == ScalarType::Long || type == ScalarType::Bool, "key_padding_mask: has dtype ",
                  dtype_name(type), "; allowed are int32, int64 and bool");
  check_same_device(*mask, "key_padding_mask", query, "query");
  Padding& padding = problem.mask.padding;
  padding.dtype = dtype_of(*mask);
  padding.filter = static_cast<float>(filter);
  const int64_t batch = problem.batch;
  if (mask->dim() == 1 && (mask->size(0) == batch || mask->size(0) == 3 * batch + 2)) {
    // [B] holds key lengths; of [3B + 2] only the first B numbers act, as in ONNX Runtime's CPU kernel.
    ONNX_ATTN_CHECK(type != ScalarType::Bool, "key_padding_mask: has dtype bool in shape ", shape_text(*mask),
                    "; lengths must be int32 or int64");
    padding.kind = Padding::Kind::lengths;
    padding.batch_stride = mask->stride(0);
  } else {
    const int64_t rank = mask->dim();
    const bool fits =
        (rank == 2 || (rank == 3 && mask->size(1) == problem.q_len)) && mask->size(0) == batch && widths.contains(mask->size(rank - 1));
    ONNX_ATTN_CHECK(fits, "key_padding_mask: has shape ", shape_text(*mask), "; with batch ", batch, ", ", problem.q_len, " queries and ",
                    widths.text(), " keys (past included) it must be [batch], [3 * batch + 2], [batch, keys] or [batch, queries, keys]");
    padding.kind = Padding::Kind::keep;
    padding.batch_stride = mask->stride(0);
    padding.query_stride = rank == 3 ? mask->stride(1) : 0;
    padding.key_stride = mask->stride(rank - 1);
    padding.columns = mask->size(rank - 1);
  }
  padding.data = mask->const_data_ptr();
}

void describe_attention_bias(Problem& problem, const OptionalTensor& bias, const KeyWidths& widths, const Tensor& query) {
  if (!bias) return;
  check_like_query(*bias, "attention_bias", query);
  const bool fits = bias->dim() == 4 && (bias->size(0) == problem.batch || bias->size(0) == 1) &&
                    (bias->size(1) == problem.q_heads || bias->size(1) == 1) && bias->size(2) == problem.q_len &&
                    widths.contains(bias->size(3));
  ONNX_ATTN_CHECK(fits, "attention_bias: has shape ", shape_text(*bias), "; it must be [", problem.batch, " or 1, ", problem.q_heads,
                  " or 1, ", problem.q_len, ", ", widths.text(), "]");
  TensorMask& tensor = problem.mask.tensor;
  tensor.kind = TensorMask::Kind::bias;
  tensor.dtype = dtype_of(*bias);
  tensor.data = bias->const_data_ptr();
  tensor.batch_stride = bias->size(0) == 1 ? 0 : bias->stride(0);
  tensor.head_stride = bias->size(1) == 1 ? 0 : bias->stride(1);
  tensor.query_stride = bias->stride(2);
  tensor.key_stride = bias->stride(3);
  tensor.columns = bias->size(3);
}

// `rows`: what the cache's axis of rows is called, past_len or capacity.
void check_cache(const Problem& problem, const Tensor& cache, const char* name, const char* rows, const Tensor& query) {
  check_like_query(cache, name, query);
  const bool fits =
      cache.dim() == 4 && cache.size(0) == problem.batch && cache.size(1) == problem.kv_heads && cache.size(3) == problem.head_size;
  ONNX_ATTN_CHECK(fits, name, ": has shape ", shape_text(cache), "; it must be [batch, num_heads, ", rows, ", head_size] = [",
                  problem.batch, ", ", problem.kv_heads, ", ", rows, ", ", problem.head_size, "]");
}

void check_caches(const Problem& problem, Layout layout, const Tensor& past_key, const OptionalTensor& past_value, const char* rows,
                  const Tensor& query) {
  ONNX_ATTN_CHECK(past_value.has_value(), "past_value: is missing; past_key and past_value must be given together");
  ONNX_ATTN_CHECK(layout != Layout::packed_qkv && layout != Layout::packed_kv, "past_key: cannot be combined with a packed query or key");
  check_cache(problem, past_key, "past_key", rows, query);
  check_cache(problem, *past_value, "past_value", rows, query);
  ONNX_ATTN_CHECK(past_value->size(2) == past_key.size(2), "past_value: has ", past_value->size(2), " rows, but past_key has ",
                  past_key.size(2));
  ONNX_ATTN_CHECK(problem.v_head_size == problem.head_size, "value: has head size ", problem.v_head_size,
                  "; with past_value it must be that of query, ", problem.head_size);
}

struct Outputs {
  OptionalTensor output, present_key, present_value, qk;
};

struct Request {
  OptionalTensor past_key, past_value;
  bool has_past = false;
  bool has_qk = false;
};

// What all overloads do once K, V and the caches are described. `widths` are those that masks over the keys may have.
Outputs finish(Problem& problem, Inputs& inputs, Outputs outputs, const KeyWidths& widths, const MhaAttributes& attributes, bool has_qk) {
  const Tensor& query = inputs.query;
  describe_padding(problem, inputs.key_padding_mask, widths, attributes.mask_filter_value, query);
  describe_attention_bias(problem, inputs.attention_bias, widths, query);
  if (attributes.unidirectional) {
    problem.mask.right = 0;  // bottom-right: query s sees key t <= keys - queries + s
    problem.mask.offset = problem.kv_len - problem.q_len;
  }
  if (has_qk) {
    problem.score_mode = ScoreMode::mha_logits;
    outputs.qk = empty_contiguous(query, type_of(query), {problem.batch, problem.q_heads, problem.q_len, problem.kv_len});
    problem.scores = outputs.qk->mutable_data_ptr();
  }
  outputs.output = empty_contiguous(query, type_of(query), {problem.batch, problem.q_len, problem.q_heads * problem.v_head_size});
  problem.y = view_bsh(*outputs.output, problem.v_head_size);
  run(problem, query);
  return outputs;
}

Outputs attend(Inputs inputs, Request request, const MhaAttributes& attributes) {
  Problem problem;
  Outputs outputs;
  const Layout layout = find_layout(inputs);
  const DeviceScope scope(inputs.query);
  describe_inputs(problem, inputs, layout, attributes);
  describe_bias(problem, inputs.bias, layout, inputs.query);
  if (request.has_past) {
    check_caches(problem, layout, *request.past_key, request.past_value, "past_len", inputs.query);
    Present present = append_to_past(problem, *request.past_key, *request.past_value);
    outputs.present_key = std::move(present.key);
    outputs.present_value = std::move(present.value);
  }
  return finish(problem, inputs, outputs, KeyWidths{problem.kv_len, problem.kv_len}, attributes, request.has_qk);
}

// ---------------------------------------------------------------------------------------------- shared caches

// past_sequence_length is device data on CUDA, so there only shapes are checked and the kernels drop what does not fit.
void check_past_sequence_length(const Tensor& length, int64_t new_len, int64_t capacity, const Tensor& query) {
  check_given(length, "past_sequence_length");
  ONNX_ATTN_CHECK(type_of(length) == ScalarType::Int || type_of(length) == ScalarType::Long, "past_sequence_length: has dtype ",
                  dtype_name(type_of(length)), "; it must be int32 or int64");
  ONNX_ATTN_CHECK(length.dim() <= 1 && length.numel() == 1, "past_sequence_length: has shape ", shape_text(length),
                  "; it must hold one element, as a scalar or [1]");
  check_same_device(length, "past_sequence_length", query, "query");
  if (!length.is_cpu()) return;
  const int64_t past = count_at(length, 0);
  ONNX_ATTN_CHECK(0 <= past && past < capacity, "past_sequence_length: is ", past, "; it must be in [0, ", capacity,
                  "), the rows of past_key");
  ONNX_ATTN_CHECK(past <= capacity - new_len, "past_sequence_length: is ", past, "; with ", new_len, " new rows that is more than the ",
                  capacity, " rows of past_key");
}

// On the CPU every beam that will be followed is checked, in the type it was given in: a cast could hide an illegal one.
void check_beams(const Tensor& indirection, const Tensor& past_length) {
  if (!indirection.is_cpu()) return;
  const int64_t beams = indirection.size(1);
  for (int64_t entry = 0; entry < indirection.size(0) * beams; ++entry) {
    const Tensor rows = torch::stable::select(torch::stable::select(indirection, 0, entry / beams), 0, entry % beams);
    for (int64_t row = 0; row < count_at(past_length, 0); ++row) {
      const int64_t beam = count_at(rows, row);
      ONNX_ATTN_CHECK(0 <= beam && beam < beams, "cache_indirection: entry ", entry, ", row ", row, " is ", beam, "; it must be in [0, ",
                      beams, ")");
    }
  }
}

// Beams act only where ONNX Runtime lets them: on single-token steps with separate keys and no mask but a 2-D one. Else they are
// checked and ignored.
void describe_beams(Problem& problem, OptionalTensor& indirection, const Inputs& inputs, Layout layout, const Lengths& past,
                    const Tensor& past_length) {
  if (!indirection) return;
  const int64_t capacity = problem.kv_len;
  ONNX_ATTN_CHECK(type_of(*indirection) == ScalarType::Int || type_of(*indirection) == ScalarType::Long, "cache_indirection: has dtype ",
                  dtype_name(type_of(*indirection)), "; it must be int32 or int64");
  check_same_device(*indirection, "cache_indirection", inputs.query, "query");
  const bool fits =
      indirection->dim() == 3 && indirection->size(0) * indirection->size(1) == problem.batch && indirection->size(2) == capacity;
  ONNX_ATTN_CHECK(fits, "cache_indirection: has shape ", shape_text(*indirection),
                  "; it must be [batch / beams, beams, capacity] with batch ", problem.batch, " and capacity ", capacity);
  const bool acts = problem.q_len == 1 && layout == Layout::separate && (!inputs.key_padding_mask || inputs.key_padding_mask->dim() == 2);
  if (!acts || problem.batch == 0) return;
  ONNX_ATTN_CHECK(problem.append.new_len == 1, "cache_indirection: needs one new key with its one query, but key has ",
                  problem.append.new_len, " rows");
  check_beams(*indirection, past_length);
  indirection = torch::stable::contiguous(torch::stable::to(*indirection, ScalarType::Int));
  Beams& beams = problem.beams;
  beams.index = static_cast<const int32_t*>(indirection->const_data_ptr());
  beams.batch_stride = capacity;
  beams.width = indirection->size(1);
  beams.past = past;
}

Tensor attend_shared(Inputs inputs, const Tensor& past_key, const Tensor& past_value, const Tensor& past_sequence_length,
                     OptionalTensor cache_indirection, const MhaAttributes& attributes) {
  Problem problem;
  const Layout layout = find_layout(inputs);
  const DeviceScope scope(inputs.query);
  describe_inputs(problem, inputs, layout, attributes);
  describe_bias(problem, inputs.bias, layout, inputs.query);
  check_caches(problem, layout, past_key, past_value, "capacity", inputs.query);
  const int64_t capacity = past_key.size(2), new_len = problem.kv_len;
  ONNX_ATTN_CHECK(new_len <= capacity, "key: has ", new_len, " rows, but past_key holds only ", capacity);
  check_past_sequence_length(past_sequence_length, new_len, capacity, inputs.query);

  start_append(problem);
  const Lengths past{past_sequence_length.const_data_ptr(), dtype_of(past_sequence_length), 0, 0};
  problem.append.first_row = past;
  problem.k = view_bhsd(past_key);
  problem.v = view_bhsd(past_value);
  problem.kv_len = capacity;
  problem.mask.lengths = Lengths{past.data, past.dtype, 0, new_len};
  problem.mask.offset_follows_length = true;
  describe_beams(problem, cache_indirection, inputs, layout, past, past_sequence_length);
  check_written_caches({past_key, "past_key"}, {past_value, "past_value"},
                       {{inputs.query, "query"},
                        {inputs.key, "key"},
                        {inputs.value, "value"},
                        {inputs.bias, "bias"},
                        {inputs.key_padding_mask, "key_padding_mask"},
                        {inputs.attention_bias, "attention_bias"},
                        {past_sequence_length, "past_sequence_length"},
                        {cache_indirection, "cache_indirection"}});
  // On the CPU the keys in use are known; on CUDA they are not, and columns that a mask lacks count as masked.
  const int64_t least = past_sequence_length.is_cpu() ? count_at(past_sequence_length, 0) + new_len : 0;
  return finish(problem, inputs, Outputs{}, KeyWidths{least, capacity}, attributes, false).output.value();
}

// ---------------------------------------------------------------------------------------------- overloads

#define INPUT_PARAMETERS                                                                                   \
  const Tensor &query, const OptionalTensor &key, const OptionalTensor &value, const OptionalTensor &bias, \
      const OptionalTensor &key_padding_mask, const OptionalTensor &attention_bias
#define INPUTS \
  Inputs { query, key, value, bias, key_padding_mask, attention_bias }
#define ATTRIBUTE_PARAMETERS int64_t num_heads, double scale, double mask_filter_value, bool unidirectional
#define ATTRIBUTES \
  MhaAttributes { num_heads, scale, mask_filter_value, unidirectional }

void check_output_qk(bool output_qk) {
  ONNX_ATTN_CHECK(output_qk, "output_qk: is false; this overload returns qk, leave the argument out to go without");
}

Tensor mha(INPUT_PARAMETERS, ATTRIBUTE_PARAMETERS) { return attend(INPUTS, Request{}, ATTRIBUTES).output.value(); }

std::tuple<Tensor, Tensor, Tensor> mha_kv(INPUT_PARAMETERS, const Tensor& past_key, const OptionalTensor& past_value,
                                          ATTRIBUTE_PARAMETERS) {
  Outputs outputs = attend(INPUTS, Request{past_key, past_value, true, false}, ATTRIBUTES);
  return {*outputs.output, *outputs.present_key, *outputs.present_value};
}

std::tuple<Tensor, Tensor> mha_qk(INPUT_PARAMETERS, bool output_qk, ATTRIBUTE_PARAMETERS) {
  check_output_qk(output_qk);
  Request request;
  request.has_qk = true;
  Outputs outputs = attend(INPUTS, request, ATTRIBUTES);
  return {*outputs.output, *outputs.qk};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> mha_kv_qk(INPUT_PARAMETERS, const Tensor& past_key, const OptionalTensor& past_value,
                                                     bool output_qk, ATTRIBUTE_PARAMETERS) {
  check_output_qk(output_qk);
  Outputs outputs = attend(INPUTS, Request{past_key, past_value, true, true}, ATTRIBUTES);
  return {*outputs.output, *outputs.present_key, *outputs.present_value, *outputs.qk};
}

Tensor mha_shared(INPUT_PARAMETERS, const Tensor& past_key, const Tensor& past_value, const Tensor& past_sequence_length,
                  const OptionalTensor& cache_indirection, ATTRIBUTE_PARAMETERS) {
  check_no_gradient(past_key, "past_key");
  check_no_gradient(past_value, "past_value");
  Tensor output = attend_shared(INPUTS, past_key, past_value, past_sequence_length, cache_indirection, ATTRIBUTES);
  count_write(past_key);
  count_write(past_value);
  return output;
}

std::tuple<Tensor, Tensor, Tensor> mha_shared_functional(INPUT_PARAMETERS, const Tensor& past_key, const Tensor& past_value,
                                                         const Tensor& past_sequence_length, const OptionalTensor& cache_indirection,
                                                         ATTRIBUTE_PARAMETERS) {
  check_given(query, "query");
  check_given(past_key, "past_key");
  check_given(past_value, "past_value");
  const DeviceScope scope(query);
  Tensor present_key = torch::stable::clone(torch::stable::contiguous(past_key));
  Tensor present_value = torch::stable::clone(torch::stable::contiguous(past_value));
  Tensor output = attend_shared(INPUTS, present_key, present_value, past_sequence_length, cache_indirection, ATTRIBUTES);
  return {output, present_key, present_value};
}

void register_mha(torch::stable::detail::StableLibrary& m) {
  m.impl("mha", TORCH_BOX(&ForwardOnly<&mha>::call));
  m.impl("mha.kv", TORCH_BOX(&ForwardOnly<&mha_kv>::call));
  m.impl("mha.qk", TORCH_BOX(&ForwardOnly<&mha_qk>::call));
  m.impl("mha.kv_qk", TORCH_BOX(&ForwardOnly<&mha_kv_qk>::call));
  m.impl("mha.shared", TORCH_BOX(&ForwardOnly<&mha_shared>::call));
  m.impl("mha.shared_functional", TORCH_BOX(&ForwardOnly<&mha_shared_functional>::call));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(onnx_attn, CPU, m) { register_mha(m); }
STABLE_TORCH_LIBRARY_IMPL(onnx_attn, CUDA, m) { register_mha(m); }

}  // namespace onnx_attn
