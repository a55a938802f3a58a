// decode_d64.cu: the decode kernel for head sizes up to 64.
#include "decode.cuh"
#include "decode_launch.h"

namespace onnx_attn::decode {

const void* kernel_64(DType dtype, bool bulk_copies) {
  if (dtype == DType::f16) {
    return bulk_copies ? reinterpret_cast<const void*>(decode_kernel<__half, 64, true>)
                       : reinterpret_cast<const void*>(decode_kernel<__half, 64, false>);
  }
  return bulk_copies ? reinterpret_cast<const void*>(decode_kernel<__nv_bfloat16, 64, true>)
                     : reinterpret_cast<const void*>(decode_kernel<__nv_bfloat16, 64, false>);
}

}  // namespace onnx_attn::decode
