// key_range.h: which keys a block of query rows can see, from lengths, causality and windows alone. Host and device.
#pragma once

#include "problem.h"

namespace onnx_attn {

struct KeyRange {
  int64_t begin = 0;
  int64_t end = 0;  // exclusive; begin >= end: no key
};

// The part of a mask that depends on the batch entry, read once for each entry.
struct RowPosition {
  int64_t length = 0;  // valid keys
  int64_t offset = 0;  // query row i stands at key position i + offset
};

ONNX_ATTN_HOST_DEVICE RowPosition row_position(const Mask& mask, int64_t batch, int64_t q_len, int64_t kv_len) {
  RowPosition position;
  position.length = mask.lengths.at(batch, kv_len);
  position.offset = mask.offset_follows_length ? position.length - q_len : mask.offset;
  return position;
}

// Keys that at least one of the query rows [row_begin, row_end) can see.
ONNX_ATTN_HOST_DEVICE KeyRange visible_keys(const Mask& mask, const RowPosition& position, int64_t row_begin, int64_t row_end) {
  KeyRange range{0, position.length};
  // A tensor mask without a column for a key excludes it.
  if (mask.tensor.kind != TensorMask::Kind::none && mask.tensor.columns < range.end) range.end = mask.tensor.columns;
  if (mask.right >= 0) {
    const int64_t end = row_end - 1 + position.offset + mask.right + 1;
    if (end < range.end) range.end = end < 0 ? 0 : end;
  }
  if (mask.left >= 0) {
    const int64_t begin = row_begin + position.offset - mask.left;
    if (begin > range.begin) range.begin = begin;
  }
  return range;
}

}  // namespace onnx_attn
