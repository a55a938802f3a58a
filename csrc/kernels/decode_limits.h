// decode_limits.h: what the decode kernel takes and how it cuts a problem up. Pure, so that it can be tested without a GPU.
#pragma once

#include "../plan.h"
#include "../problem.h"

namespace onnx_attn::decode {

inline constexpr int kComputingWarps = 8;        // of a block
inline constexpr int kMaxBlockRows = 64;         // query rows that read the keys together
inline constexpr int kMaxScannedBatch = 1024;    // lengths of more entries are not counted before the work is shared out
inline constexpr int kMaxStages = 6;             // of the ring: 192 KB
inline constexpr int kUnitSlots = 2;             // units whose queries are in shared memory: the one at hand and the next
inline constexpr int kControlBytes = 11 * 1024;  // of shared memory, beside the ring and the queries

// The query rows of the heads that share a kv head are one axis of `rows` = group * q_len rows: row = head in group * q_len +
// query. Blocks of up to row_tiles * tile_rows of them read the keys together. The keys are cut at multiples of 2^chunk_shift.
// None of this depends on the batch or on lengths, and so neither do the bits of a result.
struct Partition {
  int rows = 0;
  int tile_rows = 8;  // of a warp: 8 or 16
  int row_tiles = 1;  // 1, 2 or 4
  int row_blocks = 1;
  int key_groups = 8;   // warps that share a row tile and divide the keys; row_tiles * key_groups = kComputingWarps
  int teams = 1;        // of warps, that take tiles in turn: 1, 2 or 4
  int team_shift = 3;   // a team is 2^team_shift key groups; a tile has 16 keys for each, or more
  int chunk_shift = 0;  // chunks hold 2^chunk_shift keys
  int chunks = 1;       // of kv_len keys, at least 1

  ONNX_ATTN_HOST_DEVICE int block_rows() const { return row_tiles * tile_rows; }
};

// A line is all chunks of one (batch entry, kv head, row block). A block takes runs of chunks of a line, and adds up a run itself: one
// chunk, as many as add up before they join the rest, or the whole line. This has no part in the bits.
inline constexpr int kChunksTogether = 8;
enum class Run : int8_t { one, eight, line };
struct Tuning {
  int chunk_keys = 0;  // a power of two
  int stages = 0;      // of the ring of key and value tiles in shared memory
  Run run = Run::one;
};

// Mask elements that come with a tile, row after row. Masks whose keys are not neighbours are not staged.
struct StagedMask {
  int rows = 0;  // 0: not staged. 1: the rows of a block share it
  int element_bytes = 1;
  int pitch = 0;  // bytes from row to row
};
struct MaskLayout {
  StagedMask tensor, padding;
  int padding_offset = 0;
  int bytes = 0;  // of both, in each stage
};

int compiled_head_size(const Problem& problem);  // 64, 128 or 256; smaller heads are padded with zeros in shared memory
constexpr int tile_keys(int compiled_head_size) { return 8192 / compiled_head_size; }  // 16 KB of K
bool copies_past(const Problem& problem);  // the past rows are stored to `present` as they are read

// A thread of a block keeps four columns of one row of the run that the block adds up; with 256 columns it has no registers left.
constexpr bool may_add_up_runs(int rows, int compiled_head_size) {
  return compiled_head_size < 256 && rows * compiled_head_size <= 4 * 32 * kComputingWarps;
}

Partition partition(const Problem& problem, const Tuning& tuning);
MaskLayout mask_layout(const Problem& problem, const Partition& cut);
Tuning choose_tuning(const Problem& problem, const Device& device);

int64_t shared_bytes(const Problem& problem, const Tuning& tuning);
int64_t workspace_bytes(const Problem& problem, const Tuning& tuning);

}  // namespace onnx_attn::decode
