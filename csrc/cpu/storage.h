// storage.h: the 16-bit storage types.
#pragma once

#include <cstdint>

namespace onnx_attn::cpu {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

}  // namespace onnx_attn::cpu
