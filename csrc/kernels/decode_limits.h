// decode_limits.h: what the decode kernel takes and how it cuts a problem up. Pure, so that it can be tested without a GPU.
#pragma once

#include "../key_range.h"
#include "../plan.h"

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

inline constexpr int kChunksTogether = 8;  // results of chunks add up in eights, and then the eights

struct Tuning {
  int chunk_keys = 0;  // a power of two
  int stages = 0;      // of the ring of key and value tiles in shared memory
  int blocks = 1;      // at most, of the launch. This has no part in the bits
};

// The keys of one batch entry that some query row can see, and the chunks that hold them.
struct EntryKeys {
  int begin = 0, end = 0;
  int first_chunk = 0;
  int chunks = 1;  // an entry without keys has one, in which its zeros are written
};
ONNX_ATTN_HOST_DEVICE EntryKeys entry_keys(const Problem& problem, int chunk_shift, int64_t batch) {
  const RowPosition position = row_position(problem.mask, batch, problem.q_len, problem.kv_len);
  const KeyRange visible = visible_keys(problem.mask, position, 0, problem.q_len);
  EntryKeys keys;
  if (visible.begin >= visible.end) return keys;
  keys.begin = static_cast<int>(visible.begin);
  keys.end = static_cast<int>(visible.end);
  keys.first_chunk = keys.begin >> chunk_shift;
  keys.chunks = ((keys.end - 1) >> chunk_shift) - keys.first_chunk + 1;
  return keys;
}

// How much of the list of chunks a block takes at a time.
struct Dealing {
  int quota = 0;  // chunks with which a block begins; 0: the device chooses
  int grain = 0;  // chunks that are dealt out at a time to blocks that are done with theirs, whole lines; 0: none
};

// A line is all chunks of one (batch entry, kv head, row block). The chunks of all lines, one line after the other, are a list of
// which block b takes `quota` chunks from b * quota on: as many as each has to, or up to an eighth more where blocks then take
// whole lines and nobody has to add up what others have found.
ONNX_ATTN_HOST_DEVICE int choose_quota(int chunks, int longest_line, int blocks) {
  const int quota = (chunks + blocks - 1) / blocks, whole = (quota + longest_line - 1) / longest_line * longest_line;
  return int64_t{8} * whole <= int64_t{9} * quota ? whole : quota;
}

// The memory does not serve all multiprocessors alike: of equal shares, some blocks are done in 0.82 of the time that others take. Where
// lines are many, a quarter or more of them are dealt out, one by one. Parts of lines are not: counting and adding them up cost more
// than dealing gained (H200, 2026-12).
ONNX_ATTN_HOST_DEVICE Dealing choose_dealing(int chunks, int line, int blocks, bool may_deal) {
  constexpr int kFewestLines = 4;  // of a block
  const int lines = chunks / line / blocks;
  if (lines >= kFewestLines) {
    return may_deal ? Dealing{lines * 3 / 4 * line, line} : Dealing{(chunks / line + blocks - 1) / blocks * line, 0};
  }
  return {choose_quota(chunks, line, blocks), 0};
}

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

// A thread of a block keeps four columns of one row of the line that the block adds up; with 256 columns it has no registers left.
constexpr bool may_add_up(int rows, int compiled_head_size) {
  return compiled_head_size < 256 && rows * compiled_head_size <= 4 * 32 * kComputingWarps;
}

Partition partition(const Problem& problem, const Tuning& tuning);

// How a launch shares out the list of chunks. With lengths only the device knows what each block takes.
struct Shares {
  int64_t chunks = 0;  // of the list; with lengths, of the capacity
  Dealing dealing;
  int blocks = 1;
  bool makes_parts = false;  // of lines, for others to add up
};
Shares share_out(const Problem& problem, const Partition& cut, const Tuning& tuning, bool may_deal = true);

MaskLayout mask_layout(const Problem& problem, const Partition& cut);
Tuning choose_tuning(const Problem& problem, const Device& device);

int64_t shared_bytes(const Problem& problem, const Tuning& tuning);
int64_t workspace_bytes(const Problem& problem, const Tuning& tuning);

}  // namespace onnx_attn::decode
