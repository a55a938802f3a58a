// forward_sm90_mask.cuh: what the Hopper forward kernel does to scores before limits and softmax: scale, softcap, masks, biases, padding.
#pragma once

#include "../device/convert.cuh"
#include "forward_sm90_scores.cuh"

namespace onnx_attn::forward_sm90_kernel {

// Where the lanes of a warp find the mask of their scores in a tile.
template <class Shape, int kElementBytes>
struct MaskRows {
  uint32_t start;   // of a lane's first row
  uint32_t second;  // bytes to its second row, 8 rows further on
  uint32_t swizzle;

  // `row`: of the lane, in the block. `chunk`: 1 if the lane reads one 16-byte chunk further on than the keys that it asks for.
  __device__ __forceinline__ MaskRows(uint32_t tile, bool is_key_row, int row, int chunk)
      : start(tile + (is_key_row ? 0 : row * layout().row_bytes())),
        second(is_key_row ? 0 : 8 * layout().row_bytes()),
        swizzle(((is_key_row ? 0 : layout().swizzle(row)) ^ chunk) << 4) {}

  __device__ static __forceinline__ constexpr MaskLayout layout() { return MaskLayout{Shape::kRows, Shape::kKeys, kElementBytes}; }

  // Of an even chunk if the lane reads a chunk further on. `key` is a constant: one XOR.
  __device__ __forceinline__ uint32_t address(int key) const {
    const uint32_t byte = key % layout().panel_keys() * kElementBytes;
    return start + key / layout().panel_keys() * layout().panel_bytes() + (byte / 16 * 16 ^ swizzle) + byte % 16;
  }
};

template <class Pair>
__device__ __forceinline__ Pair load_shared(uint32_t address);
template <>
__device__ __forceinline__ uint16_t load_shared<uint16_t>(uint32_t address) {
  uint16_t value;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(address) : "memory");
  return value;
}
template <>
__device__ __forceinline__ float2 load_shared<float2>(uint32_t address) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address) : "memory");
  return value;
}

// A warp's part of a mask tile. `row`: of the warp, in the block.
template <class Shape>
__device__ __forceinline__ void keep_scores(Scores<Shape>& scores, uint32_t tile, bool is_key_row, int row) {
  const MaskRows<Shape, 1> rows(tile + fragment_column(), is_key_row, row + fragment_row(0), 0);
#pragma unroll
  for (int j = 0; j < Shape::kKeys / 8; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t keep = load_shared<uint16_t>(rows.address(8 * j) + r * rows.second);
      if (!(keep & 0xffu)) scores.value[0][j][2 * r] = -INFINITY;
      if (!(keep & 0xff00u)) scores.value[0][j][2 * r + 1] = -INFINITY;
    }
  }
}

// score * scale + bias. ldmatrix hands out a 16-bit tile in exactly the layout of the scores.
template <class Element, class Shape>
__device__ __forceinline__ void add_bias_tile(Scores<Shape>& scores, uint32_t tile, bool is_key_row, int row, float scale) {
  const int lane = lane_index();
  const MaskRows<Shape, 2> rows(tile, is_key_row, row + lane % 16, lane / 16);
#pragma unroll
  for (int j = 0; j < Shape::kKeys / 8; j += 2) {
    uint32_t pairs[4];
    load_matrices(pairs, rows.address(8 * j));
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      float* score = &scores.value[0][j + part / 2][part % 2 * 2];
      const float2 bias = unpack<Element>(pairs[part]);
      score[0] = fmaf(score[0], scale, bias.x);
      score[1] = fmaf(score[1], scale, bias.y);
    }
  }
}

template <class Shape>
__device__ __forceinline__ void add_float_tile(Scores<Shape>& scores, uint32_t tile, bool is_key_row, int row, float scale) {
  const int quarter = lane_index() % 4;  // pairs of 8 bytes, two in a chunk
  const MaskRows<Shape, 4> rows(tile + quarter % 2 * 8, is_key_row, row + fragment_row(0), quarter / 2);
#pragma unroll
  for (int j = 0; j < Shape::kKeys / 8; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 bias = load_shared<float2>(rows.address(8 * j) + r * rows.second);
      float* score = &scores.value[0][j][2 * r];
      score[0] = fmaf(score[0], scale, bias.x);
      score[1] = fmaf(score[1], scale, bias.y);
    }
  }
}

// Of calls without masks.
template <class Element, class Shape, ScoreWork kScoreWork>
struct MaskReader {
  const ScoreTransform& transform;

  __device__ __forceinline__ MaskReader(SharedMemory<Shape>&, const ForwardParams& params) : transform(params.transform) {}
  __device__ __forceinline__ void apply(Scores<Shape>& scores, const RowBlock<Shape>&, int, int) {
    if constexpr (kScoreWork == ScoreWork::cap) cap_scores<Shape>(scores, transform);
  }
  __device__ __forceinline__ void pass() {}
};

template <class Element, class Shape, ScoreWork kScoreWork>
struct MaskTileReader {
  const ForwardParams& params;
  MaskRing<Shape> ring;
  int used = 0;  // mask tiles since launch

  __device__ __forceinline__ MaskTileReader(SharedMemory<Shape>& shared, const ForwardParams& params)
      : params(params), ring(shared, mask_layout<Shape, kScoreWork>(params)) {}

  // Calls body(address) with the next tile, and releases it.
  template <class Body>
  __device__ __forceinline__ void with_tile(Body&& body) {
    ring.wait_full(used);
    body(ring.tile(used));
    release();
  }
  // A tile that only other warpgroups look at.
  __device__ __forceinline__ void pass() {
    ring.wait_full(used);
    release();
  }

 private:
  __device__ __forceinline__ void release() {
    publish_to_bulk_copies();  // the next tile must not overtake these reads
    __syncwarp();
    if (lane_index() == 0) ring.release(used);
    ++used;
  }
};

// com.microsoft: keys that are not kept get the filter, the same for all rows of a batch entry. is_kept(key) is asked of the keys in
// [first, last) alone.
template <class Shape, class IsKept>
__device__ __forceinline__ void add_filter(Scores<Shape>& scores, float filter, int first, int last, IsKept&& is_kept) {
#pragma unroll
  for (int j = 0; j < Shape::kKeys / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int key = 8 * j + e;
      const bool is_inside = key >= first && key < last;
      const float addend = is_kept(min(max(key, first), last - 1)) && is_inside ? 0.0f : filter;
      scores.value[0][j][e] += addend;
      scores.value[0][j][2 + e] += addend;
    }
  }
}

// Where the kept keys lie side by side.
template <class Shape>
__device__ __forceinline__ void add_padding(Scores<Shape>& scores, const ForwardParams& params, const RowBlock<Shape>& block,
                                            int tile_key) {
  if (params.problem.mask.padding.kind == Padding::Kind::none) return;
  if (tile_key >= block.padding_begin && tile_key + Shape::kKeys <= block.padding_end) return;
  const int column = tile_key + fragment_column();
  add_filter<Shape>(scores, params.transform.filter, block.padding_begin - column, block.padding_end - column, [](int) { return true; });
}

template <class Element, class Shape>
struct MaskReader<Element, Shape, ScoreWork::keep> : MaskTileReader<Element, Shape, ScoreWork::keep> {
  using MaskTileReader<Element, Shape, ScoreWork::keep>::MaskTileReader;

  __device__ __forceinline__ void apply(Scores<Shape>& scores, const RowBlock<Shape>& block, int row, int tile_key) {
    if (block.has_mask_tiles) {
      this->with_tile([&](uint32_t tile) { keep_scores<Shape>(scores, tile, this->params.mask.is_key_row, row); });
    }
    add_padding<Shape>(scores, this->params, block, tile_key);
  }
};

template <class Element, class Shape>
struct MaskReader<Element, Shape, ScoreWork::bias> : MaskTileReader<Element, Shape, ScoreWork::bias> {
  using MaskTileReader<Element, Shape, ScoreWork::bias>::MaskTileReader;

  __device__ __forceinline__ void apply(Scores<Shape>& scores, const RowBlock<Shape>&, int row, int) {
    const float scale = this->params.transform.scale;
    this->with_tile([&](uint32_t tile) { add_bias_tile<Element, Shape>(scores, tile, this->params.mask.is_key_row, row, scale); });
  }
};

template <class Element, class Shape>
struct MaskReader<Element, Shape, ScoreWork::masks> : MaskTileReader<Element, Shape, ScoreWork::masks> {
  using MaskTileReader<Element, Shape, ScoreWork::masks>::MaskTileReader;

  __device__ __forceinline__ void apply(Scores<Shape>& scores, const RowBlock<Shape>& block, int row, int tile_key) {
    const ForwardParams& params = this->params;
    const ScoreTransform& transform = params.transform;
    row = static_cast<int>(forget_origin(row));
    const bool is_bias = params.problem.mask.tensor.kind == TensorMask::Kind::bias;
    const bool is_scaled = transform.form == ScoreForm::scaled;
    const float scale = is_bias && is_scaled ? transform.scale : 1.0f;  // applied with the bias, as where there is nothing but one
    if (transform.form == ScoreForm::capped) cap_scores<Shape>(scores, transform);
    if (is_scaled && !is_bias) scores.for_each([&](float& score, int, int) { score *= transform.scale; });
    if (block.has_mask_tiles) {
      this->with_tile([&](uint32_t tile) {
        const bool is_key_row = params.mask.is_key_row;
        if (params.mask.element_bytes == 1) keep_scores<Shape>(scores, tile, is_key_row, row);
        if (params.mask.element_bytes == 2) add_bias_tile<Element, Shape>(scores, tile, is_key_row, row, scale);
        if (params.mask.element_bytes == 4) add_float_tile<Shape>(scores, tile, is_key_row, row, scale);
      });
    } else if (block.reads_mask) {
      apply_elements(scores, block, row, tile_key, scale);
    }
    if (block.reads_padding)
      read_padding(scores, block, tile_key);
    else
      add_padding<Shape>(scores, params, block, tile_key);
  }

 private:
  __device__ __forceinline__ void read_padding(Scores<Shape>& scores, const RowBlock<Shape>& block, int tile_key) const {
    const Padding& padding = this->params.problem.mask.padding;
    const int column = tile_key + fragment_column();
    const int first = block.padding_begin - column, last = block.padding_end - column;
    with_integer_type(padding.dtype, [&](auto type) {
      const auto* data = static_cast<const decltype(type)*>(padding.data) + block.batch * padding.batch_stride + column;
      add_filter<Shape>(scores, this->params.transform.filter, first, last, [&](int key) { return __ldg(data + key) > 0; });
    });
  }

  // Keys past the mask's columns get the last one's mask; limits exclude their scores.
  __device__ __forceinline__ void apply_elements(Scores<Shape>& scores, const RowBlock<Shape>& block, int row, int tile_key,
                                                 float scale) const {
    const Problem& problem = this->params.problem;
    const TensorMask& mask = problem.mask.tensor;
    const int column = tile_key + fragment_column(), columns = static_cast<int>(min(mask.columns, int64_t{1} << 30)) - column;
    const int64_t head = block.batch * mask.batch_stride + block.q_head * mask.head_stride + column;
    const auto visit = [&](auto type, auto&& body) {
      using Type = decltype(type);
#pragma unroll
      for (int r = 0; r < 2; ++r) {  // rows past the last query read its mask, and nobody reads them
        const int64_t query = min(int64_t{block.first_row + row + fragment_row(r)}, problem.q_len - 1);
        const Type* elements = static_cast<const Type*>(mask.data) + head + query * mask.query_stride;
#pragma unroll
        for (int j = 0; j < Shape::kKeys / 8; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            body(scores.value[0][j][2 * r + e], __ldg(elements + min(8 * j + e, columns - 1)));
          }
        }
      }
    };
    if (mask.kind == TensorMask::Kind::keep)
      visit(uint8_t(), [](float& score, uint8_t keep) { score = keep ? score : -INFINITY; });
    else if (mask.dtype == DType::f32)
      visit(float(), [&](float& score, float bias) { score = fmaf(score, scale, bias); });
    else
      visit(Element(), [&](float& score, Element bias) { score = fmaf(score, scale, convert<float>(bias)); });
  }
};

}  // namespace onnx_attn::forward_sm90_kernel
