// decode_launch.h: between decode.cu, which launches, and the files that hold the kernels of one head size each.
#pragma once

#include <cuda_runtime.h>

#include "decode_limits.h"

namespace onnx_attn::decode {

// The address of a decode kernel. `dtype` is f16 or bf16.
const void* kernel_64(DType dtype);
const void* kernel_128(DType dtype);
const void* kernel_256(DType dtype);

// Runs the decode kernel and, where a row has several chunks, the combine kernel.
cudaError_t launch(const Problem& problem, const Tuning& tuning, const Device& device, void* workspace, cudaStream_t stream);

}  // namespace onnx_attn::decode
