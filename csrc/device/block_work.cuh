// block_work.cuh: what the threads of a block that owns query rows of one head agree on, and how they stage its masks.
#pragma once

#include "fragment.cuh"
#include "masking.cuh"
#include "work.cuh"

namespace onnx_attn::device {

// Where the rows of a head begin.
template <class Element>
__device__ __forceinline__ Element* head_rows(const Tensor4& tensor, int batch, int head) {
  return static_cast<Element*>(tensor.data) + batch * tensor.batch_stride + head * tensor.head_stride;
}

struct BlockWork {
  Work work;
  RowPosition position;
  TileRange tiles;
  int key_end;  // one past the last key that any row can see
  int end_row;

  template <class Shape>
  __device__ __forceinline__ void place(const Problem& problem, const WorkOrder& order) {
    work = find_work(order, problem, Shape::kRows);
    end_row = static_cast<int>(min(int64_t{work.first_row} + Shape::kRows, problem.q_len));
    position = row_position(problem.mask, work.batch, problem.q_len, problem.kv_len);
    const KeyRange visible = visible_keys(problem.mask, position, work.first_row, end_row);
    tiles = tile_range<Shape::kKeys>(problem.mask, position, visible, work.first_row, end_row);
    key_end = static_cast<int>(visible.end);
  }
};

// Brings all that masks say of the tile of keys from `first_key` on to shared memory, as one group of copies.
template <class Shape>
__device__ __forceinline__ void stage_masks(const MaskTile<Shape::kRows, Shape::kKeys>& tile, float* key_padding, const MaskTilePlan& plan,
                                            const Mask& mask, const BlockWork& block, int first_key) {
  const Work& work = block.work;
  const MaskCorner corner{work.batch, work.q_head, work.first_row, first_key, block.end_row - work.first_row, block.key_end - first_key};
  stage_mask_tile<Shape::kRows, Shape::kKeys, Shape::kThreads>(tile, plan, mask, corner);
  stage_key_padding<Shape::kKeys>(key_padding, plan, mask.padding, work.batch, first_key);
  copy_async_commit();
}

}  // namespace onnx_attn::device
