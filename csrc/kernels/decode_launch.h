// decode_launch.h: between decode.cu, which launches, and the files that hold the kernels of one head size each.
#pragma once

#include <cuda_runtime.h>

#include "decode_limits.h"

namespace onnx_attn::decode {

// The address of a decode kernel. `dtype` is f16 or bf16, `tile_rows` that of the Partition.
const void* kernel_64(DType dtype, int tile_rows);
const void* kernel_128(DType dtype, int tile_rows);
const void* kernel_256(DType dtype);  // 8 rows

// Runs the decode kernel and, where a row has several chunks, the combine kernel.
cudaError_t launch(const Problem& problem, const Tuning& tuning, const Device& device, void* workspace, cudaStream_t stream);

}  // namespace onnx_attn::decode
