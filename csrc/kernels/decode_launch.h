// decode_launch.h: between decode.cu, which launches, and the files that hold the kernels of one head size each.
#pragma once

#include "decode_limits.h"

namespace onnx_attn::decode {

// The address of a decode kernel. `dtype` is f16 or bf16, `tile_rows` that of the Partition.
const void* kernel_64(DType dtype, int tile_rows);
const void* kernel_128(DType dtype, int tile_rows);
const void* kernel_256(DType dtype);  // 8 rows

}  // namespace onnx_attn::decode
