// convert.h: the 16-bit storage types and their scalar conversions, in bit arithmetic so that every compiler and CPU agrees.
#pragma once

#include <bit>
#include <cstdint>

namespace onnx_attn::cpu {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

inline float to_float(BFloat16 value) { return std::bit_cast<float>(uint32_t{value.bits} << 16); }

inline float to_float(Float16 value) {
  const uint32_t sign = uint32_t{value.bits & 0x8000u} << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude < 0x0400) {  // subnormal: a whole number of 2^-24, and the product is exact
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(static_cast<float>(magnitude) * 0x1p-24f));
  }
  const uint32_t exponent_shift = magnitude >= 0x7c00 ? 224u << 23 : 112u << 23;  // infinity and NaN keep a full exponent
  return std::bit_cast<float>(sign | ((magnitude << 13) + exponent_shift));
}

inline BFloat16 to_bfloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40)};  // NaN stays NaN
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16)};                  // to nearest, ties to even
}

inline Float16 to_float16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00;  // NaN
  } else if (magnitude >= 0x477ff000u) {
    half = 0x7c00;  // 65520 and above round to infinity
  } else if (magnitude < 0x38800000u) {
    // Below 2^-14. The sum with 0.5 has a step of 2^-24, the step of subnormals, and rounds to nearest even.
    half = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1)) >> 13;
  }
  return {static_cast<uint16_t>(sign | half)};
}

// to<T>(x): any storage value as a compute value. from(x, &y): a compute value into storage, rounded once from float.
template <class T>
inline T to(double value) {
  return static_cast<T>(value);
}
template <class T>
inline T to(float value) {
  return static_cast<T>(value);
}
template <class T>
inline T to(Float16 value) {
  return static_cast<T>(to_float(value));
}
template <class T>
inline T to(BFloat16 value) {
  return static_cast<T>(to_float(value));
}

template <class T>
inline void from(T value, double* storage) {
  *storage = static_cast<double>(value);
}
template <class T>
inline void from(T value, float* storage) {
  *storage = static_cast<float>(value);
}
template <class T>
inline void from(T value, Float16* storage) {
  *storage = to_float16(static_cast<float>(value));
}
template <class T>
inline void from(T value, BFloat16* storage) {
  *storage = to_bfloat16(static_cast<float>(value));
}

}  // namespace onnx_attn::cpu
