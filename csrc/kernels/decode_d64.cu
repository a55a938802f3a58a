// decode_d64.cu: the decode kernel for head sizes up to 64.
#include "decode.cuh"
#include "decode_launch.h"

namespace onnx_attn::decode {

const void* kernel_64(DType dtype, int tile_rows) {
  if (tile_rows == 8) {
    return dtype == DType::f16 ? reinterpret_cast<const void*>(decode_kernel<__half, 64, 1>)
                               : reinterpret_cast<const void*>(decode_kernel<__nv_bfloat16, 64, 1>);
  }
  return dtype == DType::f16 ? reinterpret_cast<const void*>(decode_kernel<__half, 64, 2>)
                             : reinterpret_cast<const void*>(decode_kernel<__nv_bfloat16, 64, 2>);
}

}  // namespace onnx_attn::decode
