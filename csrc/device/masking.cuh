// masking.cuh: limits, tensor masks and key padding applied to a tile of scores that is in registers.
#pragma once

#include <cfloat>

#include "../key_range.h"
#include "convert.cuh"
#include "fragment.cuh"

namespace onnx_attn::device {

// A bias in the units of scores may overflow to -inf, but a row of lowest floats is an ordinary softmax: this is where such
// a bias stops. It is -inf for -inf alone, and far below every score for an ordinary bias. Two of the lowest overflow again.
__host__ __device__ __forceinline__ float bias_floor(float bias) { return fmaf(bias, 0.5f, -3e37f); }

// What a mask tile holds in shared memory. keep is a byte for each score; the others are biases in natural units, of
// which -inf excludes a key.
enum class MaskTileFormat : int8_t { none, keep, f16, bf16, f32 };

__host__ __device__ constexpr int element_bytes(MaskTileFormat format) {
  return format == MaskTileFormat::keep ? 1 : format == MaskTileFormat::f32 ? 4 : 2;
}

// How the tensor mask and the padding of a Problem reach the scores; decided on the host.
struct MaskTilePlan {
  MaskTileFormat format = MaskTileFormat::none;
  bool by_chunks = false;        // rows are copied as they are, 16 aligned bytes at a time; else element by element
  bool one_row = false;          // no query axis: the tile is a single row
  bool joined_padding = false;   // padding has a query axis and is added to the (f32) tile
  bool key_padding = false;      // padding is one number for each key, kept in its own row
  float key_padding_filter = 0;  // for keys that are not kept; in score units
  float bias_unit = 1;           // score units in a natural unit

  __host__ __device__ constexpr bool is_empty() const { return format == MaskTileFormat::none && !key_padding; }
};

// The tile of a mask: kRows x kKeys elements, rows 16 bytes further apart than they are long, which keeps eight rows in
// different banks.
template <int kRows, int kKeys>
struct MaskTile {
  uint8_t* data;
  int pitch;  // bytes from row to row; 0 when one row serves all

  __host__ __device__ static constexpr int row_bytes(MaskTileFormat format) { return kKeys * element_bytes(format) + 16; }
  __host__ __device__ static constexpr int bytes(const MaskTilePlan& plan) {
    return plan.format == MaskTileFormat::none ? 0 : (plan.one_row ? 1 : kRows) * row_bytes(plan.format);
  }
  __device__ __forceinline__ MaskTile(uint8_t* data, const MaskTilePlan& plan)
      : data(data), pitch(plan.one_row ? 0 : row_bytes(plan.format)) {}
};

// The corner of a tile in the mask, and how much of it exists; what lies beyond is never looked at.
struct MaskCorner {
  int batch, head, row, key;
  int rows, keys;  // at most kRows; any number of keys
};

// Starts copying rows of a tensor mask as they are.
template <int kRows, int kKeys, int kThreads, int kElementBytes>
__device__ __forceinline__ void copy_mask_rows(const MaskTile<kRows, kKeys>& tile, const TensorMask& mask, const MaskCorner& at) {
  constexpr int kPitch = kKeys * kElementBytes + 16;
  constexpr int kChunks = kKeys * kElementBytes / 16, kRowStep = kThreads / kChunks;
  static_assert(kThreads % kChunks == 0);
  const int first_row = threadIdx.x / kChunks, byte = threadIdx.x % kChunks * 16;
  const int bytes = max(0, min(16, at.keys * kElementBytes - byte));
  const int64_t row_bytes = mask.query_stride * kElementBytes;
  const int64_t corner = at.batch * mask.batch_stride + at.head * mask.head_stride + at.row * mask.query_stride + at.key;
  const uint8_t* source = static_cast<const uint8_t*>(mask.data) + corner * kElementBytes + first_row * row_bytes + byte;
  uint32_t target = shared_address(tile.data) + first_row * kPitch + byte;
  const int rows = tile.pitch == 0 ? 1 : at.rows;
#pragma unroll 4
  for (int row = first_row; row < rows; row += kRowStep) {
    copy_async_16(target, source, bytes);
    source += kRowStep * row_bytes;
    target += kRowStep * kPitch;
  }
}

// Calls body(row, key) for each element of the tile that exists; a thread always gets the same elements.
template <int kRows, int kKeys, int kThreads, class Body>
__device__ __forceinline__ void for_each_mask_element(const MaskTile<kRows, kKeys>& tile, const MaskCorner& at, Body&& body) {
  const int rows = tile.pitch == 0 ? 1 : at.rows;
#pragma unroll 4
  for (int index = rows * kKeys - 1 - static_cast<int>(threadIdx.x); index >= 0; index -= kThreads) {
    if (index % kKeys < at.keys) body(index / kKeys, index % kKeys);
  }
}

template <class Element>
__device__ __forceinline__ float bias_as_float(Element bias) {
  if constexpr (std::is_same_v<Element, double>) bias = bias < -FLT_MAX && bias != -INFINITY ? -FLT_MAX : bias;
  return convert<float>(bias);
}

// The same for any stride and type, and with padding that has a query axis.
template <int kRows, int kKeys, int kThreads>
__device__ __forceinline__ void gather_mask_elements(const MaskTile<kRows, kKeys>& tile, const MaskTilePlan& plan, const Mask& mask,
                                                     const MaskCorner& at) {
  const TensorMask& tensor = mask.tensor;
  const int64_t corner =
      at.batch * tensor.batch_stride + at.head * tensor.head_stride + at.row * tensor.query_stride + at.key * tensor.key_stride;
  const auto element = [&](int row, int key) { return corner + row * tensor.query_stride + key * tensor.key_stride; };
  const auto as_float = [&](int row, int key) -> float& { return reinterpret_cast<float*>(tile.data + row * tile.pitch)[key]; };

  if (tensor.kind == TensorMask::Kind::bias) {
    with_float_type(tensor.dtype, [&](auto type) {
      const auto* data = static_cast<const decltype(type)*>(tensor.data);
      for_each_mask_element<kRows, kKeys, kThreads>(tile, at,
                                                    [&](int row, int key) { as_float(row, key) = bias_as_float(data[element(row, key)]); });
    });
  } else {
    const bool* data = static_cast<const bool*>(tensor.data);
    for_each_mask_element<kRows, kKeys, kThreads>(tile, at, [&](int row, int key) {
      const bool keep = tensor.kind == TensorMask::Kind::none || data[element(row, key)];
      if (plan.format == MaskTileFormat::keep)
        tile.data[row * tile.pitch + key] = keep;
      else
        as_float(row, key) = keep ? 0.0f : -INFINITY;
    });
  }
  if (plan.joined_padding) {
    const Padding& padding = mask.padding;
    const int64_t padding_row = at.batch * padding.batch_stride + at.row * padding.query_stride;
    with_integer_type(padding.dtype, [&](auto type) {
      const auto* data = static_cast<const decltype(type)*>(padding.data) + padding_row;
      for_each_mask_element<kRows, kKeys, kThreads>(tile, at, [&](int row, int key) {
        const int column = at.key + key;
        const bool kept = column < padding.columns && data[row * padding.query_stride + column * padding.key_stride] > 0;
        if (!kept) as_float(row, key) += padding.filter;
      });
    });
  }
}

// Brings the mask of a tile to shared memory. It is there once the caller's next copy_async_wait and barrier are over.
template <int kRows, int kKeys, int kThreads>
__device__ __forceinline__ void stage_mask_tile(const MaskTile<kRows, kKeys>& tile, const MaskTilePlan& plan, const Mask& mask,
                                                const MaskCorner& at) {
  if (plan.format == MaskTileFormat::none) return;
  if (!plan.by_chunks) return gather_mask_elements<kRows, kKeys, kThreads>(tile, plan, mask, at);
  switch (element_bytes(plan.format)) {
    case 1: return copy_mask_rows<kRows, kKeys, kThreads, 1>(tile, mask.tensor, at);
    case 2: return copy_mask_rows<kRows, kKeys, kThreads, 2>(tile, mask.tensor, at);
    default: return copy_mask_rows<kRows, kKeys, kThreads, 4>(tile, mask.tensor, at);
  }
}

// target[key] = 0 or the filter of the padding.
template <int kKeys>
__device__ __forceinline__ void stage_key_padding(float* target, const MaskTilePlan& plan, const Padding& padding, int batch,
                                                  int first_key) {
  if (!plan.key_padding || threadIdx.x >= kKeys) return;
  const int key = first_key + static_cast<int>(threadIdx.x);
  with_integer_type(padding.dtype, [&](auto type) {
    const auto* data = static_cast<const decltype(type)*>(padding.data) + batch * padding.batch_stride;
    const bool kept = padding.kind == Padding::Kind::lengths ? key < static_cast<int64_t>(*data)
                                                             : key < padding.columns && data[key * padding.key_stride] > 0;
    target[threadIdx.x] = kept ? 0.0f : plan.key_padding_filter;
  });
}

// ---- scores in registers; `warp_row` is the warp's first row in the tile

// kMayOverflow: not for the range of float16. NaN stays visible, which fmaxf would not do.
template <bool kMayOverflow>
__device__ __forceinline__ float add_bias(float score, float bias, float bias_unit) {
  const float sum = fmaf(bias, bias_unit, score);
  return kMayOverflow ? max_or_nan(sum, bias_floor(bias)) : sum;
}

// ldmatrix hands out a 16-bit tile in exactly the layout of the scores.
template <class Element, bool kMayOverflow, int kRows, int kKeys, int kRowTiles>
__device__ __forceinline__ void add_bias_tile(Accumulator<kRowTiles, kKeys / 8>& scores, const MaskTile<kRows, kKeys>& tile, int warp_row,
                                              float bias_unit) {
  const int lane = lane_index();
  const uint32_t start = shared_address(tile.data) + (warp_row + lane % 16) * tile.pitch + lane / 16 * 16;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) {
      uint32_t pairs[4];
      load_matrices(pairs, start + 16 * i * tile.pitch + 32 * j);
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        float (&value)[4] = scores.value[i][2 * j + part / 2];
        const float2 bias = unpack<Element>(pairs[part]);
        value[part % 2 * 2] = add_bias<kMayOverflow>(value[part % 2 * 2], bias.x, bias_unit);
        value[part % 2 * 2 + 1] = add_bias<kMayOverflow>(value[part % 2 * 2 + 1], bias.y, bias_unit);
      }
    }
  }
}

// Calls body(first, second, bytes) for each pair of neighbouring scores, with the address of their mask elements.
template <int kElementBytes, int kRows, int kKeys, int kRowTiles, class Body>
__device__ __forceinline__ void for_each_pair(Accumulator<kRowTiles, kKeys / 8>& scores, const MaskTile<kRows, kKeys>& tile, int warp_row,
                                              Body&& body) {
#pragma unroll
  for (int row = 0; row < 2 * kRowTiles; ++row) {
    const uint8_t* elements = tile.data + (warp_row + fragment_row(row)) * tile.pitch + fragment_column() * kElementBytes;
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
      float* pair = &scores.value[row / 2][j][row % 2 * 2];
      body(pair[0], pair[1], elements + 8 * j * kElementBytes);
    }
  }
}

// kNaturalUnits: scores are what the operator calls scores. A bias of theirs overflows where the operator's own does.
template <bool kNaturalUnits = false, int kRows, int kKeys, int kRowTiles>
__device__ __forceinline__ void apply_mask_tile(Accumulator<kRowTiles, kKeys / 8>& scores, const MaskTile<kRows, kKeys>& tile,
                                                const MaskTilePlan& plan, int warp_row) {
  const float bias_unit = plan.bias_unit;
  if (plan.format == MaskTileFormat::keep) {  // a select: the score of a key that is not kept may be NaN
    for_each_pair<1>(scores, tile, warp_row, [](float& first, float& second, const uint8_t* bytes) {
      const uint32_t keep = *reinterpret_cast<const uint16_t*>(bytes);
      if (!(keep & 0xffu)) first = -INFINITY;
      if (!(keep & 0xff00u)) second = -INFINITY;
    });
  }
  if (plan.format == MaskTileFormat::f16) add_bias_tile<__half, false>(scores, tile, warp_row, bias_unit);
  if (plan.format == MaskTileFormat::bf16) add_bias_tile<__nv_bfloat16, !kNaturalUnits>(scores, tile, warp_row, bias_unit);
  if (plan.format == MaskTileFormat::f32) {  // -inf may stand for a key that is not kept
    for_each_pair<4>(scores, tile, warp_row, [&](float& first, float& second, const uint8_t* bytes) {
      const float2 bias = *reinterpret_cast<const float2*>(bytes);
      const float first_sum = add_bias<!kNaturalUnits>(first, bias.x, bias_unit);
      const float second_sum = add_bias<!kNaturalUnits>(second, bias.y, bias_unit);
      first = bias.x == -INFINITY ? -INFINITY : first_sum;
      second = bias.y == -INFINITY ? -INFINITY : second_sum;
    });
  }
}

template <int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void add_key_padding(Accumulator<kRowTiles, kKeyTiles>& scores, const float* padding) {
  padding += fragment_column();
#pragma unroll
  for (int j = 0; j < kKeyTiles; ++j) {
    const float2 pair = *reinterpret_cast<const float2*>(padding + 8 * j);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      scores.value[i][j][0] += pair.x;
      scores.value[i][j][1] += pair.y;
      scores.value[i][j][2] += pair.x;
      scores.value[i][j][3] += pair.y;
    }
  }
}

// All that was staged of a tile.
template <bool kNaturalUnits = false, int kRows, int kKeys, int kRowTiles>
__device__ __forceinline__ void apply_masks(Accumulator<kRowTiles, kKeys / 8>& scores, const MaskTile<kRows, kKeys>& tile,
                                            const float* key_padding, const MaskTilePlan& plan, int warp_row) {
  apply_mask_tile<kNaturalUnits>(scores, tile, plan, warp_row);
  if (plan.key_padding) add_key_padding(scores, key_padding);
}

// Excludes keys outside a row's window and keys at or past `key_end`. A select: such a score may be NaN.
template <int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void exclude_invisible(Accumulator<kRowTiles, kKeyTiles>& scores, const Mask& mask, const RowPosition& position,
                                                  int key_end, int warp_row, int first_key) {
  constexpr int64_t kKeys = 8 * kKeyTiles;
#pragma unroll
  for (int row = 0; row < 2 * kRowTiles; ++row) {
    const int query = warp_row + fragment_row(row);
    const KeyRange keys = visible_keys(mask, position, query, query + 1);
    // Visible columns, less the lane's part of a column.
    const int begin = static_cast<int>(max(int64_t{0}, min(kKeys, keys.begin - first_key))) - fragment_column();
    const int end = static_cast<int>(max(int64_t{0}, min(kKeys, min(keys.end, int64_t{key_end}) - first_key))) - fragment_column();
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& score = scores.value[row / 2][j][row % 2 * 2 + e];
        if (8 * j + e < begin || 8 * j + e >= end) score = -INFINITY;
      }
    }
  }
}

}  // namespace onnx_attn::device
