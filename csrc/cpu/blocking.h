// blocking.h: how one CPU attention call is cut into units of work. Fixed by the shape of one batch entry, so that neither
// the batch size nor the number of threads can change a bit of the result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "../problem.h"

namespace onnx_attn::cpu {

// Measured on Zen 5 (48 KB L1, 1 MB L2): see benchmarks/cpu.py.
inline constexpr int64_t kKeyTile = 128;     // keys that are packed, scored and summed together
inline constexpr int64_t kSubBlock = 32;     // rows whose scores of one tile stay in L1
inline constexpr int64_t kFewRows = 6;       // up to here transposing K costs more than dot products
inline constexpr int64_t kSplitKeys = 1024;  // keys of one unit where a head has a single block of rows
inline constexpr int64_t kPad = 16;          // head sizes are padded to this many elements: lanes of the widest vector

// The rows of a kv head are all its query heads' rows: row r is position r / group of query head kv_head * group + r % group.
// Neighbouring rows thus share K, V and nearly the same visible keys.
struct Blocking {
  int64_t group = 1;
  int64_t rows = 0;        // q_len * group
  int64_t row_block = 0;   // rows of one unit
  int64_t row_blocks = 0;
  int64_t key_splits = 1;  // units along the keys; more than one: their results are combined in order
  int64_t units = 0;       // batch * kv_heads * key_splits * row_blocks
  bool few_rows = false;

  int64_t padded_head = 0;
  int64_t padded_v_head = 0;
  int64_t compute_size = 4;       // bytes of the compute type
  int64_t partial_row = 0;        // elements of one row of a split's result: the sums of V, then maximum and sum
  int64_t partial_elements = 0;   // of all splits of all heads of the batch; 0 with a single split
  size_t scratch_bytes = 0;       // of one thread
};

Blocking make_blocking(const Problem& problem);

// The parts of one thread's scratch, each 64-byte aligned. T is the compute type.
template <class T>
struct Scratch {
  T* queries;            // [row_block][padded_head], scaled
  T* keys;               // one tile of K: packed for the tile product, or as rows for dot products
  T* values;             // [kKeyTile][padded_v_head]
  T* scores;             // [kSubBlock][kKeyTile]
  T* sums;               // [row_block][padded_v_head], unnormalised output
  T* row_max;            // [row_block]
  T* row_sum;            // [row_block][kPad], one partial sum for each lane
  T* row_base;           // [kSubBlock] what is subtracted before exp
  T* row_factor;         // [kSubBlock] what rescales the sums of earlier tiles
  T* key_bias;           // [padded_head]
  T* value_bias;         // [padded_v_head]
  T* mask_row;           // [kKeyTile], additive
  T* padding_row;        // [kKeyTile], additive
  const void** row_pointers;  // [2 * kKeyTile], rows of K, then of V

  // Lays the parts out from `base` and returns the bytes they take; with a null base it only measures.
  size_t lay_out(const Blocking& blocking, char* base) {
    size_t used = 0;
    const auto take = [&](auto*& part, int64_t count) {
      using Element = std::remove_reference_t<decltype(*part)>;
      part = base ? reinterpret_cast<Element*>(base + used) : nullptr;
      used += (static_cast<size_t>(count) * sizeof(Element) + 63) / 64 * 64;
    };
    take(queries, blocking.row_block * blocking.padded_head);
    take(keys, kKeyTile * blocking.padded_head);
    take(values, kKeyTile * blocking.padded_v_head);
    take(scores, kSubBlock * kKeyTile);
    take(sums, blocking.row_block * blocking.padded_v_head);
    take(row_max, blocking.row_block + kPad);
    take(row_sum, blocking.row_block * kPad);
    take(row_base, kSubBlock + kPad);
    take(row_factor, kSubBlock + kPad);
    take(key_bias, blocking.padded_head);
    take(value_bias, blocking.padded_v_head);
    take(mask_row, kKeyTile);
    take(padding_row, kKeyTile);
    take(row_pointers, 2 * kKeyTile);
    return used;
  }
};

// A unit of work, run by the code of one instruction set. `partials` is null with a single split.
using RunUnit = void (*)(const Problem& problem, const Blocking& blocking, int64_t unit, char* scratch, void* partials);
// Joins the splits of one kv head, in order.
using Combine = void (*)(const Problem& problem, const Blocking& blocking, int64_t head, const void* partials);

struct Kernel {
  RunUnit run_unit;
  Combine combine;
};

// Null where the compiler does not target x86-64.
const Kernel* avx512_kernel(DType compute);
const Kernel* avx2_kernel(DType compute);
const Kernel* baseline_kernel(DType compute);

}  // namespace onnx_attn::cpu
