// convert.inl: scalar conversions of the storage types, in bit arithmetic so that every compiler and CPU agrees.
// Included inside an unnamed namespace by each file that converts: what is compiled for a newer CPU stays in that file.

#define ONNX_ATTN_INLINE static inline __attribute__((always_inline))

ONNX_ATTN_INLINE float to_float(BFloat16 value) { return __builtin_bit_cast(float, uint32_t{value.bits} << 16); }

ONNX_ATTN_INLINE float to_float(Float16 value) {
  const uint32_t sign = uint32_t{value.bits & 0x8000u} << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude < 0x0400) {  // subnormal: a whole number of 2^-24, and the product is exact
    return __builtin_bit_cast(float, sign | __builtin_bit_cast(uint32_t, static_cast<float>(magnitude) * 0x1p-24f));
  }
  const uint32_t exponent_shift = magnitude >= 0x7c00 ? 224u << 23 : 112u << 23;  // infinity and NaN keep a full exponent
  return __builtin_bit_cast(float, sign | ((magnitude << 13) + exponent_shift));
}

ONNX_ATTN_INLINE BFloat16 to_bfloat16(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40)};  // NaN stays NaN
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16)};                  // to nearest, ties to even
}

ONNX_ATTN_INLINE Float16 to_float16(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00;  // NaN
  } else if (magnitude >= 0x477ff000u) {
    half = 0x7c00;  // 65520 and above round to infinity
  } else if (magnitude < 0x38800000u) {
    // Below 2^-14. The sum with 0.5 has a step of 2^-24, the step of subnormals, and rounds to nearest even.
    half = __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1)) >> 13;
  }
  return {static_cast<uint16_t>(sign | half)};
}

// to<T>(x): any storage value as a compute value. from(x, &y): a compute value into storage, rounded once from float.
template <class T>
ONNX_ATTN_INLINE T to(double value) {
  return static_cast<T>(value);
}
template <class T>
ONNX_ATTN_INLINE T to(float value) {
  return static_cast<T>(value);
}
template <class T>
ONNX_ATTN_INLINE T to(Float16 value) {
  return static_cast<T>(to_float(value));
}
template <class T>
ONNX_ATTN_INLINE T to(BFloat16 value) {
  return static_cast<T>(to_float(value));
}

template <class T>
ONNX_ATTN_INLINE void from(T value, double* storage) {
  *storage = static_cast<double>(value);
}
template <class T>
ONNX_ATTN_INLINE void from(T value, float* storage) {
  *storage = static_cast<float>(value);
}
template <class T>
ONNX_ATTN_INLINE void from(T value, Float16* storage) {
  *storage = to_float16(static_cast<float>(value));
}
template <class T>
ONNX_ATTN_INLINE void from(T value, BFloat16* storage) {
  *storage = to_bfloat16(static_cast<float>(value));
}
