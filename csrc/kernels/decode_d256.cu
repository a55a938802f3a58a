// decode_d256.cu: the decode kernel for head sizes up to 256.
#include "decode.cuh"
#include "decode_launch.h"

namespace onnx_attn::decode {

const void* kernel_256(DType dtype) {
  return dtype == DType::f16 ? reinterpret_cast<const void*>(decode_kernel<__half, 256, 1>)
                             : reinterpret_cast<const void*>(decode_kernel<__nv_bfloat16, 256, 1>);
}

}  // namespace onnx_attn::decode
