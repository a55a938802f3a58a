// decode_limits.cpp: what the decode kernel takes and how it cuts a problem up. No CUDA: the planner of a CPU build asks too.
#include "decode_limits.h"

#include "../launch.h"
#include "kernel_limits.h"

namespace onnx_attn::decode {

namespace {

constexpr int64_t kMaxQueries = 16;
constexpr int64_t kMaxHeadSize = 256;
constexpr int64_t kLargestIndex = int64_t{1} << 30;  // positions of keys, and units of work, are 32-bit numbers on the device

int64_t ceil_div(int64_t value, int64_t by) { return (value + by - 1) / by; }

StagedMask stage_mask(int rows, int keys, DType dtype) {
  constexpr int kUnit = 16;  // keeps rows aligned; one more leaves room for a first word that is not the row's alone
  StagedMask staged;
  staged.rows = rows;
  staged.element_bytes = onnx_attn::element_bytes(dtype);
  staged.pitch = keys * staged.element_bytes + kUnit;
  return staged;
}

// Chunks hold 256 KB of keys and values, which lets one short sequence occupy the device, or 512 KB where there are more than 2 MB of
// them for each head: every end of a chunk costs the computing warps a microsecond (one sequence of 8192 keys and 8 heads: 13.5 us
// instead of 14.7). Up to 16 query rows, a chunk has at least 32 keys for each, so that writing and reading its partial results is
// at most 1/16 of reading the keys. At most 128 chunks; a single one where two would do, since that saves adding up. (H200, 2026-11)
int choose_chunk_keys(const Problem& problem) {
  constexpr int64_t kMaxChunks = 128, kKeysPerRow = 32, kMaxRows = 16;
  const int64_t rows = problem.q_heads / problem.kv_heads * problem.q_len;
  int64_t keys = 65536 / compiled_head_size(problem);
  if (problem.kv_len > 8 * keys) keys *= 2;
  while (keys < kKeysPerRow * (rows < kMaxRows ? rows : kMaxRows)) keys *= 2;
  while (ceil_div(problem.kv_len, keys) > kMaxChunks) keys *= 2;
  if (problem.kv_len <= 2 * keys) keys *= 2;
  return static_cast<int>(keys);
}

// The kernel stores the past rows of tiles that it reads: all tiles must be read, then, and what is read must be the present.
const char* append_refusal(const Problem& problem) {
  constexpr int64_t kMaxNewRows = 64;
  const Append& append = problem.append;
  if (append.new_len > kMaxNewRows) return "the decode kernel appends up to 64 rows";
  if (!has_aligned_rows(append.new_k, problem.batch, problem.kv_heads, append.new_len) ||
      !has_aligned_rows(append.new_v, problem.batch, problem.kv_heads, append.new_len)) {
    return "the decode kernel appends rows that start at multiples of 16 bytes";
  }
  if (!copies_past(problem)) return nullptr;
  if (!has_aligned_rows(append.past_k, problem.batch, problem.kv_heads, append.past_len) ||
      !has_aligned_rows(append.past_v, problem.batch, problem.kv_heads, append.past_len)) {
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

Partition partition(const Problem& problem, const Tuning& tuning) {
  Partition cut;
  cut.rows = static_cast<int>(problem.q_heads / problem.kv_heads * problem.q_len);
  cut.tile_rows = cut.rows <= 8 || compiled_head_size(problem) == 256 ? 8 : 16;  // 16 rows of 256 columns are too many registers
  cut.row_tiles = cut.rows <= cut.tile_rows ? 1 : cut.rows <= 2 * cut.tile_rows ? 2 : 4;
  cut.row_blocks = static_cast<int>(ceil_div(cut.rows, cut.block_rows()));
  cut.key_groups = kComputingWarps / cut.row_tiles;
  const int tile_blocks = tile_keys(compiled_head_size(problem)) / 16;
  cut.teams = cut.key_groups > tile_blocks ? cut.key_groups / tile_blocks : 1;
  cut.team_shift = 0;
  while ((cut.teams << cut.team_shift) < cut.key_groups) ++cut.team_shift;
  while ((1 << cut.chunk_shift) < tuning.chunk_keys) ++cut.chunk_shift;
  cut.chunks = static_cast<int>(problem.kv_len > 0 ? ceil_div(problem.kv_len, tuning.chunk_keys) : 1);
  return cut;
}

Shares share_out(const Problem& problem, const Partition& cut, const Tuning& tuning, bool may_deal) {
  const bool has_lengths = problem.mask.lengths.data != nullptr;
  const int line = has_lengths ? cut.chunks : entry_keys(problem, cut.chunk_shift, 0).chunks;
  Shares shares;
  shares.chunks = problem.batch * problem.kv_heads * cut.row_blocks * line;
  if (has_lengths) {
    shares.blocks = static_cast<int>(shares.chunks < tuning.blocks ? shares.chunks : tuning.blocks);
  } else {
    shares.dealing = choose_dealing(static_cast<int>(shares.chunks), line, tuning.blocks, may_deal);
    shares.blocks = static_cast<int>(shares.dealing.grain > 0 ? tuning.blocks : ceil_div(shares.chunks, shares.dealing.quota));
  }
  const bool takes_whole_lines = shares.dealing.quota % line == 0 && shares.dealing.quota > 0;
  shares.makes_parts = cut.chunks > 1 && !(takes_whole_lines && may_add_up(cut.rows, compiled_head_size(problem)));
  return shares;
}

MaskLayout mask_layout(const Problem& problem, const Partition& cut) {
  const TensorMask& tensor = problem.mask.tensor;
  const Padding& padding = problem.mask.padding;
  const int keys = tile_keys(compiled_head_size(problem));
  const int block_rows = cut.rows < cut.block_rows() ? cut.rows : cut.block_rows();
  const bool is_one_query = problem.q_len == 1, is_one_head = problem.q_heads == problem.kv_heads;
  MaskLayout layout;
  if (tensor.kind != TensorMask::Kind::none && tensor.key_stride == 1) {
    const bool is_shared = (is_one_head || tensor.head_stride == 0) && (is_one_query || tensor.query_stride == 0);
    layout.tensor = stage_mask(is_shared ? 1 : block_rows, keys, tensor.dtype);
  }
  if (padding.kind == Padding::Kind::keep && padding.key_stride == 1) {
    layout.padding = stage_mask(is_one_query || padding.query_stride == 0 ? 1 : block_rows, keys, padding.dtype);
  }
  constexpr int kStageUnit = 128;  // of the banks, which the swizzle relies on
  layout.padding_offset = layout.tensor.rows * layout.tensor.pitch;
  layout.bytes = static_cast<int>(ceil_div(layout.padding_offset + layout.padding.rows * layout.padding.pitch, kStageUnit)) * kStageUnit;
  return layout;
}

int64_t shared_bytes(const Problem& problem, const Tuning& tuning) {
  const int head_size = compiled_head_size(problem);
  const Partition cut = partition(problem, tuning);
  const int64_t stage_bytes = int64_t{4} * tile_keys(head_size) * head_size + mask_layout(problem, cut).bytes;
  const int64_t query_bytes = int64_t{2} * cut.block_rows() * head_size;
  return tuning.stages * stage_bytes + kUnitSlots * query_bytes + kControlBytes;
}

Tuning choose_tuning(const Problem& problem, const Device& device) {
  Tuning tuning;
  tuning.chunk_keys = choose_chunk_keys(problem);
  tuning.stages = kMaxStages;
  while (tuning.stages > 1 && shared_bytes(problem, tuning) > device.max_shared_memory) --tuning.stages;
  if (device.sm_count > 0) tuning.blocks = device.sm_count;
  return tuning;
}

int64_t workspace_bytes(const Problem& problem, const Tuning& tuning) {
  const Partition cut = partition(problem, tuning);
  if (!share_out(problem, cut, tuning).makes_parts) return 0;
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
  if (problem.head_size < 8 || problem.head_size % 8 != 0 || problem.head_size > kMaxHeadSize) {
    return "the decode kernel takes head sizes that are multiples of 8 up to 256";
  }
  if (problem.v_head_size < 8 || problem.v_head_size % 8 != 0 || problem.v_head_size > kMaxHeadSize) {
    return "the decode kernel takes value head sizes that are multiples of 8 up to 256";
  }
  if (problem.score_mode != ScoreMode::none) return "the decode kernel does not write scores";
  if (problem.beams.index) return "the decode kernel does not follow beams";
  if (!problem.append.active && (problem.k_bias || problem.v_bias)) {
    return "the decode kernel adds a bias to K and V only when it appends them";
  }
  if (problem.mask.tensor.kind == TensorMask::Kind::bias && problem.mask.tensor.dtype == DType::f64) {
    return "the decode kernel does not read float64 biases";
  }
  if (!has_aligned_rows(problem.q, problem.batch, problem.q_heads, problem.q_len) ||
      !has_aligned_rows(problem.k, problem.batch, problem.kv_heads, problem.kv_len) ||
      !has_aligned_rows(problem.v, problem.batch, problem.kv_heads, problem.kv_len)) {
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
