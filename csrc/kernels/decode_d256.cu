// decode_d256.cu: the decode kernel for head sizes up to 256.
#include "decode.cuh"
#include "decode_launch.h"

namespace onnx_attn::decode {

const void* kernel_256(DType dtype, bool bulk_copies) {
  if (dtype == DType::f16) {
    return bulk_copies ? reinterpret_cast<const void*>(decode_kernel<__half, 256, true>)
                       : reinterpret_cast<const void*>(decode_kernel<__half, 256, false>);
  }
  return bulk_copies ? reinterpret_cast<const void*>(decode_kernel<__nv_bfloat16, 256, true>)
                     : reinterpret_cast<const void*>(decode_kernel<__nv_bfloat16, 256, false>);
}

}  // namespace onnx_attn::decode
