// decode_d128.cu: the decode kernel for head sizes up to 128.
#include "decode.cuh"
#include "decode_launch.h"

namespace onnx_attn::decode {

const void* kernel_128(DType dtype, int tile_rows) {
  if (tile_rows == 8) {
    return dtype == DType::f16 ? reinterpret_cast<const void*>(decode_kernel<__half, 128, 1>)
                               : reinterpret_cast<const void*>(decode_kernel<__nv_bfloat16, 128, 1>);
  }
  return dtype == DType::f16 ? reinterpret_cast<const void*>(decode_kernel<__half, 128, 2>)
                             : reinterpret_cast<const void*>(decode_kernel<__nv_bfloat16, 128, 2>);
}

}  // namespace onnx_attn::decode
