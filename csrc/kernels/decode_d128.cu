// decode_d128.cu: the decode kernel for head sizes up to 128.
#include "decode.cuh"
#include "decode_launch.h"

namespace onnx_attn::decode {

const void* kernel_128(DType dtype, bool bulk_copies) {
  if (dtype == DType::f16) {
    return bulk_copies ? reinterpret_cast<const void*>(decode_kernel<__half, 128, true>)
                       : reinterpret_cast<const void*>(decode_kernel<__half, 128, false>);
  }
  return bulk_copies ? reinterpret_cast<const void*>(decode_kernel<__nv_bfloat16, 128, true>)
                     : reinterpret_cast<const void*>(decode_kernel<__nv_bfloat16, 128, false>);
}

}  // namespace onnx_attn::decode
