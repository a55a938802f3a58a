// blocking.h: how one CPU attention call is cut into units of work. Fixed by the shape of one batch entry, so that neither
// the batch size nor the number of threads can change a bit of the result.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../problem.h"

namespace onnx_attn::cpu {

// Measured on Zen 5 (48 KB L1, 1 MB L2): see benchmarks/cpu.py.
inline constexpr int64_t kKeyTile = 128;     // keys that are packed, scored and summed together
inline constexpr int64_t kSubBlock = 64;     // rows whose scores of one tile stay in L1
inline constexpr int64_t kEdgeBlock = 16;    // the same where rows see different keys
inline constexpr int64_t kFewRows = 6;       // up to here transposing K costs more than dot products
inline constexpr int64_t kSplitKeys = 1024;  // keys of one unit where a head has a single block of rows
inline constexpr int64_t kPad = 16;          // head sizes are padded to this many elements: lanes of the widest vector

// The rows of a kv head are all its query heads' rows: row r is position r / group of query head kv_head * group + r % group.
// Neighbouring rows thus share K, V and nearly the same visible keys.
struct Blocking {
  int64_t group = 1;
  int64_t rows = 0;       // q_len * group
  int64_t row_block = 0;  // rows of one unit
  int64_t row_blocks = 0;
  int64_t key_splits = 1;  // units along the keys; more than one: their results are combined in order
  int64_t units = 0;       // batch * kv_heads * key_splits * row_blocks
  bool few_rows = false;

  int64_t padded_head = 0;
  int64_t padded_v_head = 0;
  int64_t compute_size = 4;      // bytes of the compute type
  int64_t partial_row = 0;       // elements of one row of a split's result: the sums of V, then maximum and sum
  int64_t partial_elements = 0;  // of all splits of all heads of the batch; 0 with a single split
};

Blocking make_blocking(const Problem& problem);

// The code of one instruction set for one compute type.
struct Kernel {
  // Bytes of scratch that run_unit needs, 64-byte aligned; one for each thread.
  size_t (*scratch_bytes)(const Blocking& blocking);
  // Runs a unit of work. With key splits it leaves its rows in `partials`.
  void (*run_unit)(const Problem& problem, const Blocking& blocking, int64_t unit, char* scratch, void* partials);
  // Joins the splits of one kv head of the batch, in order.
  void (*combine)(const Problem& problem, const Blocking& blocking, int64_t head, void* partials);
};

// Each defined by the file of its name.
namespace avx512 {
const Kernel* kernel(DType compute);
}
namespace avx2 {
const Kernel* kernel(DType compute);
}
namespace baseline {
const Kernel* kernel(DType compute);
}

}  // namespace onnx_attn::cpu
