// fragment.cuh: tiles in shared memory, which lane holds which element of them for mma.sync m16n8k16, and products of tiles.
#pragma once

#include "ptx_sm80.cuh"

namespace onnx_attn::device {

// Float results of a warp: kRowTiles * 16 rows by kColumnTiles * 8 columns. Element e of value[i][j] has row
// 16 * i + 8 * (e / 2) + lane / 4 and column 8 * j + 2 * (lane % 4) + e % 2, so a lane holds 2 * kRowTiles rows and four
// lanes share each of them.
template <int kRowTiles, int kColumnTiles>
struct Accumulator {
  float value[kRowTiles][kColumnTiles][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) value[i][j][e] = 0.0f;
  }

  // Calls body(element, row, column) for every element; `row` counts this lane's rows from 0, `column` lacks the lane's part.
  template <class Body>
  __device__ __forceinline__ void for_each(Body&& body) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) body(value[i][j][e], 2 * i + e / 2, 8 * j + e % 2);
  }
};

__device__ __forceinline__ int lane_index() { return threadIdx.x % 32; }
__device__ __forceinline__ int fragment_row(int lane_row) { return 8 * lane_row + lane_index() / 4; }  // in the warp's rows
__device__ __forceinline__ int fragment_column() { return 2 * (lane_index() % 4); }                    // the lane's part of a column

// Over the four lanes that share a row.
__device__ __forceinline__ float max_of_row(float value) {
  value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
  return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
}
__device__ __forceinline__ float sum_of_row(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}

template <class Element>
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  if constexpr (std::is_same_v<Element, __half>)
    return __half22float2(reinterpret_cast<const __half2&>(pair));
  else
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// Columns 16 * k ... + 15 of a row tile as the left operand of the next product: the same lanes hold the same elements.
template <class Element>
__device__ __forceinline__ void pack_operand(uint32_t (&operand)[4], const float (&left)[4], const float (&right)[4]) {
  operand[0] = pack<Element>(left[0], left[1]);
  operand[1] = pack<Element>(left[2], left[3]);
  operand[2] = pack<Element>(right[0], right[1]);
  operand[3] = pack<Element>(right[2], right[3]);
}

// kRows x kColumns 16-bit elements. The 16-byte chunks of a row are permuted (XORed with a key made from the row) so that
// the eight rows of one ldmatrix matrix fall into different banks.
template <int kRows, int kColumns>
struct SwizzledTile {
  static_assert(kColumns % 32 == 0);
  static constexpr int kChunks = kColumns / 8;  // of 16 bytes
  static constexpr int kPitch = kColumns * 2;
  static constexpr int kBytes = kRows * kPitch;
  static constexpr int kSpan = kChunks % 8 == 0 ? 8 : 4;  // chunks that trade places among each other

  // Rows of an odd number of spans of 4 alternate between the halves of the 128 bytes of banks: a key serves two rows.
  __device__ static __forceinline__ int key(int row) { return kSpan == 8 ? row % 8 : row / 2 % 4; }
  __device__ static __forceinline__ uint32_t offset(int row, int chunk) { return row * kPitch + ((chunk ^ key(row)) << 4); }
};

// The order in which ldmatrix fetches the four matrices of a 16x16 block. rows_first: (rows 0-7, low columns), (8-15, low),
// (0-7, high), (8-15, high), for a left operand (Q) and a transposed right one (V). columns_first: (0-7, low), (0-7, high),
// (8-15, low), (8-15, high), for a right operand whose rows are the n index (K).
enum class BlockOrder { rows_first, columns_first };

// Addresses that a lane gives to ldmatrix to read 16x16 blocks of a SwizzledTile.
template <class Tile, BlockOrder kOrder>
struct BlockReader {
  uint32_t row_start;
  uint32_t lane_chunk;  // in bytes

  __device__ __forceinline__ explicit BlockReader(uint32_t tile) {
    const int lane = lane_index();
    const int row = kOrder == BlockOrder::rows_first ? lane % 16 : lane % 8 + lane / 16 * 8;
    const int chunk = kOrder == BlockOrder::rows_first ? lane / 16 : lane / 8 % 2;
    row_start = tile + row * Tile::kPitch;
    lane_chunk = (chunk ^ Tile::key(row)) << 4;
  }
  // Block (i, j) covers rows 16 * i and columns 16 * j on. Only the XOR needs an instruction when i and j are constants.
  __device__ __forceinline__ uint32_t operator()(int i, int j) const {
    constexpr int kSpanBytes = Tile::kSpan * 16;
    return row_start + i * 16 * Tile::kPitch + j * 32 / kSpanBytes * kSpanBytes + (static_cast<uint32_t>(j * 32 % kSpanBytes) ^ lane_chunk);
  }
};

// result[.][column] += left * right for 16 columns. Split numbers (split.cuh) have two parts, high and low, and three products, the
// smallest first.
template <class Element, int kParts, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void multiply_parts(Accumulator<kRowTiles, kColumnTiles>& result, int column,
                                               const uint32_t (&left)[kParts][kRowTiles][4], const uint32_t (&right)[kParts][4]) {
#pragma unroll
  for (int product = kParts == 1 ? 2 : 0; product < 3; ++product) {
    const int left_part = product == 0 ? 1 : 0, right_part = product == 1 ? 1 : 0;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      multiply_accumulate<Element>(result.value[i][column], left[left_part][i], right[right_part][0], right[right_part][1]);
      multiply_accumulate<Element>(result.value[i][column + 1], left[left_part][i], right[right_part][2], right[right_part][3]);
    }
  }
}

// result += left * right^T for rows of both in shared memory, at these addresses; the tiles of a number's parts follow each other.
template <class Element, int kParts, class LeftTile, class RightTile, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void multiply_rows(Accumulator<kRowTiles, kColumnTiles>& result, uint32_t left, uint32_t right) {
  const BlockReader<LeftTile, BlockOrder::rows_first> left_blocks(left);
  const BlockReader<RightTile, BlockOrder::columns_first> right_blocks(right);
#pragma unroll
  for (int step = 0; step < LeftTile::kChunks / 2; ++step) {
    uint32_t left_parts[kParts][kRowTiles][4];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) load_matrices(left_parts[part][i], left_blocks(i, step) + part * LeftTile::kBytes);
    }
#pragma unroll
    for (int j = 0; j < kColumnTiles / 2; ++j) {
      uint32_t right_parts[kParts][4];
#pragma unroll
      for (int part = 0; part < kParts; ++part) load_matrices(right_parts[part], right_blocks(j, step) + part * RightTile::kBytes);
      multiply_parts<Element>(result, 2 * j, left_parts, right_parts);
    }
  }
}

// Starts copying kRows rows of up to kColumns elements into a SwizzledTile, with zeros for rows at or past `rows` and for
// chunks at or past `chunks`, none of which are read. All kThreads threads call it.
template <int kRows, int kColumns, int kThreads, class Element>
__device__ __forceinline__ void load_tile_async(uint32_t tile, const Element* source, int64_t row_stride, int rows, int chunks) {
  using Tile = SwizzledTile<kRows, kColumns>;
  constexpr int kRowStep = kThreads / Tile::kSpan;
  static_assert(kRows % kRowStep == 0 && kRowStep % 8 == 0, "a thread keeps its swizzle key");
  const int first_row = threadIdx.x / Tile::kSpan, first_chunk = threadIdx.x % Tile::kSpan;
  const uint32_t target = tile + Tile::offset(first_row, first_chunk);
  source += first_row * row_stride + first_chunk * 8;
#pragma unroll
  for (int row = 0; row < kRows; row += kRowStep) {
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunks; chunk += Tile::kSpan) {
      const bool exists = first_row + row < rows && first_chunk + chunk < chunks;
      copy_async_16(target + row * Tile::kPitch + chunk * 16, source + chunk * 8, exists ? 16 : 0);
    }
    source += kRowStep * row_stride;
  }
}

}  // namespace onnx_attn::device
