// forward_sm90.cuh: attention forward for Hopper: a warpgroup whose warps deal and load (forward_sm90_dealer.cuh,
// forward_sm90_loader.cuh) and two or three that compute (forward_sm90_consumer.cuh). A call's scores, if it wants those that enter the
// softmax, leave as they are computed (forward_sm90_score_output.cuh).
//
// Key tiles go from the last to the first through rings in shared memory, so that the tiles at the ragged end and on the
// diagonal, which need limits, come first. A thread block computes one block of query rows, or as many as it is dealt: then the
// next one's first tiles arrive, and are computed, while this one's output leaves.
#pragma once

#include "forward_sm90_consumer.cuh"
#include "forward_sm90_dealer.cuh"
#include "forward_sm90_loader.cuh"

namespace onnx_attn::forward_sm90_kernel {

template <class Element, class Shape, ScoreWork kScoreWork>
__global__ void __launch_bounds__(Shape::kThreads, 1) forward(const __grid_constant__ ForwardParams params) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  SharedMemory<Shape>& shared = *reinterpret_cast<SharedMemory<Shape>*>(shared_bytes);

  if (threadIdx.x == 0) {
    constexpr int kWarps = Shape::kWarpgroups * 4, kLoaders = has_mask(kScoreWork) || Shape::kWritesScores ? 3 : 2;
    shared.query_ring.init(1, 1);
#pragma unroll
    for (uint64_t& barrier : shared.output_full) barrier_init(shared_address(&barrier), kWarps);
    shared.key_ring.init(1, Shape::kWarpgroups);
    shared.value_ring.init(1, Shape::kWarpgroups);
    shared.mask_ring.init(1, kWarps);
    shared.block_ring.init(1, kWarps + kLoaders);
    publish_barriers_to_copies();
    publish_to_bulk_copies();
  }
  if (threadIdx.x == 32) {
    prefetch_map(params.maps.q);
    prefetch_map(params.maps.k);
    prefetch_map(params.maps.v);
    prefetch_map(params.maps.y);
  }
  __syncthreads();

  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroupThreads, 0) - 1;  // the shuffle tells ptxas that it is uniform
  if (warpgroup < 0) {
    shrink_registers<Shape::kLoaderRegisters>();
    if (threadIdx.x == 0) load_keys_and_values(shared, params);
    if (threadIdx.x == 32) load_queries_and_store_output(shared, params);
    if (threadIdx.x / 32 == 2) deal_blocks<Shape, kScoreWork>(shared, params, [](const RowBlock<Shape>&, int) {});
    if (has_mask(kScoreWork) && threadIdx.x == 96) load_mask_tiles<Shape, kScoreWork>(shared, params);
    if constexpr (Shape::kWritesScores) {
      static_assert(!has_mask(kScoreWork), "the fourth warp has one job");
      if (threadIdx.x / 32 == 3) fill_invisible_scores<Element, Shape>(shared, params.problem, -INFINITY);
    }
  } else {
    grow_registers<Shape::kConsumerRegisters>();
    consume<Element, Shape, kScoreWork>(shared, params, warpgroup);
  }
}

}  // namespace onnx_attn::forward_sm90_kernel
