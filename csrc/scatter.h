// scatter.h: the row updates of ONNX TensorScatter, and the length scan of an attention mask, as plain data.
#pragma once

#include <cstdint>

#include "mask.h"

namespace onnx_attn {

inline constexpr int kMaxScatterRank = 8;

// cache[b, ..., (write_indices[b] + s) (mod axis length when circular), ...] = update[b, ..., s, ...]. Linear rows that fall outside the
// axis are dropped.
struct Scatter {
  void* cache = nullptr;
  const void* update = nullptr;
  int element_size = 0;                         // bytes: 1, 2, 4, 8 or 16
  int rank = 0;                                 // 2 ... kMaxScatterRank; axis 0 is the batch
  int axis = 0;                                 // the axis that write_indices counts along; >= 1
  int64_t sizes[kMaxScatterRank] = {};          // of `update`
  int64_t cache_axis_size = 0;                  // sizes[axis] of the cache; every other size is the update's
  int64_t cache_strides[kMaxScatterRank] = {};  // in elements; any
  int64_t update_strides[kMaxScatterRank] = {};
  const int64_t* write_indices = nullptr;  // [batch], contiguous; null: all zero
  bool circular = false;
};

// lengths[b] = 1 + the last key that the last query row of a mask allows in any head (true, or above -1000); 0 when there is none.
struct ValidLength {
  TensorMask mask;    // kind keep or bias
  int64_t batch = 0;  // entries of `lengths`
  int64_t heads = 0;
  int64_t last_query = 0;      // index of the row that is scanned
  int64_t* lengths = nullptr;  // [batch]
};

}  // namespace onnx_attn
