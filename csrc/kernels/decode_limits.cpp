// decode_limits.cpp: what the decode kernel takes and how it cuts a problem up. No CUDA: the planner of a CPU build asks too.
#include "decode_limits.h"

#include "../key_range.h"
#include "../launch.h"

namespace onnx_attn::decode {

namespace {

constexpr int64_t kMaxQueries = 16;
constexpr int64_t kMaxHeadSize = 256;
constexpr int64_t kLargestIndex = int64_t{1} << 30;  // positions of keys, and units of work, are 32-bit numbers on the device
constexpr int kMaxStages = 6;

bool is_half(DType dtype) { return dtype == DType::f16 || dtype == DType::bf16; }

// Rows start at multiples of `bytes`; a stride along an axis of one element is never used.
bool has_aligned_rows(const Tensor4& tensor, int64_t batch, int64_t heads, int64_t rows, int bytes) {
  const int64_t elements = bytes / 2;
  return reinterpret_cast<uintptr_t>(tensor.data) % bytes == 0 && (batch <= 1 || tensor.batch_stride % elements == 0) &&
         (heads <= 1 || tensor.head_stride % elements == 0) && (rows <= 1 || tensor.row_stride % elements == 0);
}

// A tensor map wants strides that grow from something; an expanded axis (stride 0) is left to the ordinary copies.
bool fits_tensor_map(const Tensor4& tensor, const Problem& problem, int64_t rows) {
  const auto fits = [](int64_t stride, int64_t extent) { return extent <= 1 || (stride > 0 && stride < (int64_t{1} << 39)); };
  return rows >= 1 && fits(tensor.batch_stride, problem.batch) && fits(tensor.head_stride, problem.kv_heads) &&
         fits(tensor.row_stride, rows);
}

int64_t ceil_div(int64_t value, int64_t by) { return (value + by - 1) / by; }

// Chunks hold 256 KB of keys and values: long enough for the ring to stay full and for partial results (1 % of the bytes
// read at 4 query rows) not to matter, short enough for one sequence of 8192 keys with 8 heads to occupy 128 SMs. At most 64
// of them, which the combine kernel reads in one pass; a single one where two would do, since that saves the combine kernel.
int choose_chunk_keys(const Problem& problem) {
  constexpr int64_t kMaxChunks = 64;
  int64_t keys = 65536 / compiled_head_size(problem);
  while (ceil_div(problem.kv_len, keys) > kMaxChunks) keys *= 2;
  if (problem.kv_len <= 2 * keys) keys *= 2;
  return static_cast<int>(keys);
}

// The kernel stores the past rows of tiles that it reads: all tiles must be read, then, and what is read must be the present.
const char* append_refusal(const Problem& problem) {
  constexpr int64_t kMaxNewRows = 64;
  const Append& append = problem.append;
  if (append.new_len > kMaxNewRows) return "the decode kernel appends up to 64 rows";
  if (!has_aligned_rows(append.new_k, problem.batch, problem.kv_heads, append.new_len, 16) ||
      !has_aligned_rows(append.new_v, problem.batch, problem.kv_heads, append.new_len, 16)) {
    return "the decode kernel appends rows that start at multiples of 16 bytes";
  }
  if (!copies_past(problem)) return nullptr;
  if (!has_aligned_rows(append.past_k, problem.batch, problem.kv_heads, append.past_len, 16) ||
      !has_aligned_rows(append.past_v, problem.batch, problem.kv_heads, append.past_len, 16)) {
    return "the decode kernel copies past rows that start at multiples of 16 bytes";
  }
  const RowPosition position{problem.kv_len, problem.mask.offset_follows_length ? problem.kv_len - problem.q_len : problem.mask.offset};
  const KeyRange visible = visible_keys(problem.mask, position, 0, problem.q_len);
  if (problem.mask.lengths.data || append.first_row.data || append.past_len + append.new_len != problem.kv_len || visible.begin > 0 ||
      visible.end < problem.kv_len) {
    return "the decode kernel does not copy past rows that attention need not read";
  }
  return nullptr;
}

}  // namespace

bool copies_past(const Problem& problem) { return problem.append.active && problem.append.past_k.data && problem.append.past_len > 0; }

int compiled_head_size(const Problem& problem) {
  const int64_t size = problem.head_size > problem.v_head_size ? problem.head_size : problem.v_head_size;
  return size <= 64 ? 64 : size <= 128 ? 128 : 256;
}

int stage_bytes(int compiled_head_size) { return 2 * tile_keys(compiled_head_size) * compiled_head_size * 2; }

Partition partition(const Problem& problem, const Tuning& tuning) {
  Partition cut;
  cut.rows = static_cast<int>(problem.q_heads / problem.kv_heads * problem.q_len);
  const bool is_wide = compiled_head_size(problem) == 256;  // a thread needs the registers of two
  const int most_tiles = is_wide ? 2 : 4;
  cut.row_tiles = cut.rows <= kTileRows ? 1 : cut.rows <= 2 * kTileRows ? 2 : most_tiles;
  cut.row_blocks = static_cast<int>(ceil_div(cut.rows, cut.row_tiles * kTileRows));
  cut.key_groups = (is_wide ? 4 : 8) / cut.row_tiles;
  const int tile_blocks = tile_keys(compiled_head_size(problem)) / 16;
  cut.teams = cut.key_groups > tile_blocks ? cut.key_groups / tile_blocks : 1;
  while ((1 << cut.chunk_shift) < tuning.chunk_keys) ++cut.chunk_shift;
  cut.chunks = static_cast<int>(problem.kv_len > 0 ? ceil_div(problem.kv_len, tuning.chunk_keys) : 1);
  return cut;
}

int64_t shared_bytes(const Problem& problem, const Tuning& tuning) {
  constexpr int64_t kAlignment = 1024;  // of the swizzled tiles
  const int head_size = compiled_head_size(problem);
  const int64_t query_bytes = int64_t{2} * kUnitSlots * partition(problem, tuning).row_tiles * kTileRows * head_size;
  return kAlignment + int64_t{tuning.stages} * stage_bytes(head_size) + query_bytes + kControlBytes;
}

bool can_copy_in_bulk(const Problem& problem, const Device& device) {
  const Tensor4& k = copies_past(problem) ? problem.append.past_k : problem.k;
  const Tensor4& v = copies_past(problem) ? problem.append.past_v : problem.v;
  const int64_t rows = copies_past(problem) ? problem.append.past_len : problem.kv_len;
  return device.capability >= 90 && fits_tensor_map(k, problem, rows) && fits_tensor_map(v, problem, rows);
}

Tuning choose_tuning(const Problem& problem, const Device& device) {
  Tuning tuning;
  tuning.chunk_keys = choose_chunk_keys(problem);
  tuning.blocks_per_sm = 1;
  tuning.stages = kMaxStages;
  while (tuning.stages > 1 && shared_bytes(problem, tuning) > device.max_shared_memory) --tuning.stages;
  return tuning;
}

int64_t workspace_bytes(const Problem& problem, const Tuning& tuning) {
  const Partition cut = partition(problem, tuning);
  if (cut.chunks == 1) return 0;
  const int64_t results = problem.batch * problem.kv_heads * cut.rows * cut.chunks;
  return results * (problem.v_head_size + 2) * static_cast<int64_t>(sizeof(float));
}

}  // namespace onnx_attn::decode

namespace onnx_attn::cuda {

const char* decode_refusal(const Problem& problem) {
  using namespace decode;
  if (!is_half(problem.dtype)) return "the decode kernel takes float16 and bfloat16";
  if (problem.v_dtype != problem.dtype) return "the decode kernel takes V of Q's type only";
  if (problem.compute != DType::f32) return "the decode kernel computes in float32 only";
  if (problem.q_len < 1 || problem.q_len > kMaxQueries) return "the decode kernel takes 1 to 16 query rows";
  if (problem.head_size % 8 != 0 || problem.head_size > kMaxHeadSize)
    return "the decode kernel takes head sizes that are multiples of 8 up to 256";
  if (problem.v_head_size < 8 || problem.v_head_size % 8 != 0 || problem.v_head_size > kMaxHeadSize) {
    return "the decode kernel takes value head sizes that are multiples of 8 up to 256";
  }
  if (problem.score_mode != ScoreMode::none) return "the decode kernel does not write scores";
  if (problem.beams.index) return "the decode kernel does not follow beams";
  if (!problem.append.active && (problem.k_bias || problem.v_bias))
    return "the decode kernel adds a bias to K and V only when it appends them";
  if (problem.mask.tensor.kind == TensorMask::Kind::bias && problem.mask.tensor.dtype == DType::f64) {
    return "the decode kernel does not read float64 biases";
  }
  if (!has_aligned_rows(problem.q, problem.batch, problem.q_heads, problem.q_len, 16) ||
      !has_aligned_rows(problem.k, problem.batch, problem.kv_heads, problem.kv_len, 16) ||
      !has_aligned_rows(problem.v, problem.batch, problem.kv_heads, problem.kv_len, 16)) {
    return "the decode kernel reads rows that start at multiples of 16 bytes";
  }
  if (!has_aligned_rows(problem.y, problem.batch, problem.q_heads, problem.q_len, 8)) {
    return "the decode kernel writes rows that start at multiples of 8 bytes";
  }
  if (problem.append.active) {
    if (const char* reason = append_refusal(problem)) return reason;
  }
  const int64_t rows = problem.batch * problem.q_heads * problem.q_len;
  if (problem.kv_len > kLargestIndex || rows > kLargestIndex || rows * ceil_div(problem.kv_len + 1, 256) > kLargestIndex) {
    return "the decode kernel counts up to 2^30 keys and pieces of work";
  }
  return nullptr;
}

int64_t decode_workspace_bytes(const Problem& problem, const Device& device) {
  return decode::workspace_bytes(problem, decode::choose_tuning(problem, device));
}

}  // namespace onnx_attn::cuda
