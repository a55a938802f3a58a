// vector.inl: vectors of a compute type for one instruction set: loads, stores, conversions, shuffles, exp and tanh.
// Included by kernel.inl inside a namespace of its own for each instruction set.

constexpr int kVectorBytes = ONNX_ATTN_VECTOR_BYTES;
constexpr int kPanelVectors = ONNX_ATTN_PANEL_VECTORS;  // vectors of one row of a register tile

template <class E, int N>
struct PackOf {
  typedef E type __attribute__((vector_size(sizeof(E) * N)));
};
template <class E, int N>
using Pack = typename PackOf<E, N>::type;

template <class T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));
template <class T>
using Vector = Pack<T, kLanes<T>>;
template <class T>
struct IntegerOf;
template <>
struct IntegerOf<float> {
  using type = int32_t;
};
template <>
struct IntegerOf<double> {
  using type = int64_t;
};
template <class T>
using Integers = Pack<typename IntegerOf<T>::type, kLanes<T>>;

template <class T>
constexpr T kMinusInfinity = -static_cast<T>(__builtin_inf());

template <class V>
ONNX_ATTN_INLINE V load_bits(const void* source) {
  V result;
  __builtin_memcpy(&result, source, sizeof(V));
  return result;
}
template <class T>
ONNX_ATTN_INLINE Vector<T> splat(T value) {
  return value - Vector<T>{};
}
template <class T>
ONNX_ATTN_INLINE Vector<T> select(Integers<T> condition, Vector<T> yes, Vector<T> no) {
  return condition ? yes : no;
}

// ---- storage types -------------------------------------------------------------------------------------------------

template <int N>
ONNX_ATTN_INLINE Pack<float, N> widen(Pack<uint16_t, N> halves, BFloat16) {
  return (Pack<float, N>)(__builtin_convertvector(halves, Pack<uint32_t, N>) << 16);
}

template <int N>
ONNX_ATTN_INLINE Pack<float, N> widen(Pack<uint16_t, N> halves, Float16) {
#if ONNX_ATTN_X86_LEVEL >= 4
  if constexpr (N == 16) return (Pack<float, N>)_mm512_cvtph_ps((__m256i)halves);
#endif
#if ONNX_ATTN_X86_LEVEL >= 3
  if constexpr (N == 8) return (Pack<float, N>)_mm256_cvtph_ps((__m128i)halves);
#endif
  using Bits = Pack<uint32_t, N>;
  const Bits bits = __builtin_convertvector(halves, Bits);
  const Bits sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
  // Subnormals are whole numbers of 2^-24: exact as a product.
  const Bits small = (Bits)(__builtin_convertvector((Pack<int32_t, N>)magnitude, Pack<float, N>) * 0x1p-24f);
  const Bits shift = magnitude >= 0x7c00u ? Bits{} + (224u << 23) : Bits{} + (112u << 23);
  const Bits normal = (magnitude << 13) + shift;
  return (Pack<float, N>)(sign | (magnitude < 0x0400u ? small : normal));
}

template <int N>
ONNX_ATTN_INLINE Pack<uint16_t, N> narrow(Pack<float, N> value, BFloat16) {
  using Bits = Pack<uint32_t, N>;
  const Bits bits = (Bits)value;
  const Bits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Bits quiet = (bits >> 16) | 0x40u;
  return __builtin_convertvector((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded, Pack<uint16_t, N>);
}

template <int N>
ONNX_ATTN_INLINE Pack<uint16_t, N> narrow(Pack<float, N> value, Float16) {
#if ONNX_ATTN_X86_LEVEL >= 4
  if constexpr (N == 16) return (Pack<uint16_t, N>)_mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#endif
#if ONNX_ATTN_X86_LEVEL >= 3
  if constexpr (N == 8) return (Pack<uint16_t, N>)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#endif
  Pack<uint16_t, N> result;
  for (int i = 0; i < N; ++i) result[i] = to_float16(value[i]).bits;
  return result;
}

// The first `count` <= kLanes<T> elements, then zeros; reads nothing behind them.
template <class T, class Storage>
ONNX_ATTN_INLINE Vector<T> load_partial(const Storage* source, int64_t count) {
  Vector<T> result{};
  for (int64_t i = 0; i < count; ++i) result[i] = to<T>(source[i]);
  return result;
}

// kLanes<T> storage elements as a compute vector.
template <class T, class Storage>
ONNX_ATTN_INLINE Vector<T> load_as(const Storage* source) {
  constexpr int N = kLanes<T>;
  if constexpr (sizeof(Storage) == 2) {
    const Pack<float, N> wide = widen<N>(load_bits<Pack<uint16_t, N>>(source), Storage{});
    if constexpr (sizeof(T) == 4)
      return wide;
    else
      return __builtin_convertvector(wide, Vector<T>);
  } else if constexpr (sizeof(Storage) == sizeof(T)) {
    return load_bits<Vector<T>>(source);
  } else if constexpr (sizeof(Storage) < sizeof(T)) {
    return __builtin_convertvector(load_bits<Pack<Storage, N>>(source), Vector<T>);
  } else {
    return load_partial<T>(source, N);  // wider than a register, and rare
  }
}

template <class T>
ONNX_ATTN_INLINE Vector<T> load(const T* source) {
  return load_bits<Vector<T>>(source);
}

template <class T>
ONNX_ATTN_INLINE void store(T* target, Vector<T> value) {
  __builtin_memcpy(target, &value, sizeof(value));
}

template <class T, class Storage>
ONNX_ATTN_INLINE void store_as(Storage* target, Vector<T> value) {
  constexpr int N = kLanes<T>;
  if constexpr (sizeof(Storage) == 2) {
    const Pack<uint16_t, N> halves = narrow<N>(__builtin_convertvector(value, Pack<float, N>), Storage{});
    __builtin_memcpy(target, &halves, sizeof(halves));
  } else if constexpr (sizeof(Storage) <= sizeof(T)) {
    const Pack<Storage, N> converted = __builtin_convertvector(value, Pack<Storage, N>);
    __builtin_memcpy(target, &converted, sizeof(converted));
  } else {
    for (int i = 0; i < N; ++i) from<T>(value[i], target + i);
  }
}

// kLanes<T> bytes as integers of T's size. (GCC 12 takes __builtin_convertvector apart into single elements here.)
template <class T>
ONNX_ATTN_INLINE Integers<T> load_bytes(const uint8_t* source) {
#if ONNX_ATTN_X86_LEVEL >= 4
  if constexpr (sizeof(T) == 4)
    return (Integers<T>)_mm512_cvtepu8_epi32(load_bits<__m128i>(source));
  else
    return (Integers<T>)_mm512_cvtepu8_epi64(_mm_cvtsi64_si128(load_bits<int64_t>(source)));
#elif ONNX_ATTN_X86_LEVEL >= 3
  if constexpr (sizeof(T) == 4)
    return (Integers<T>)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(load_bits<int64_t>(source)));
  else
    return (Integers<T>)_mm256_cvtepu8_epi64(_mm_cvtsi32_si128(load_bits<int32_t>(source)));
#else
  Integers<T> result;
  for (int i = 0; i < kLanes<T>; ++i) result[i] = source[i];
  return result;
#endif
}

// ---- arithmetic ----------------------------------------------------------------------------------------------------

// The larger value; `b` where either is NaN.
template <class T>
ONNX_ATTN_INLINE Vector<T> maximum(Vector<T> a, Vector<T> b) {
#if ONNX_ATTN_X86_LEVEL >= 4
  if constexpr (sizeof(T) == 4)
    return (Vector<T>)_mm512_max_ps((__m512)a, (__m512)b);
  else
    return (Vector<T>)_mm512_max_pd((__m512d)a, (__m512d)b);
#elif ONNX_ATTN_X86_LEVEL >= 3
  if constexpr (sizeof(T) == 4)
    return (Vector<T>)_mm256_max_ps((__m256)a, (__m256)b);
  else
    return (Vector<T>)_mm256_max_pd((__m256d)a, (__m256d)b);
#else
  return a > b ? a : b;
#endif
}

// To the nearest whole number, for magnitudes that fit in 32 bits.
template <class T>
ONNX_ATTN_INLINE Vector<T> round_to_whole(Vector<T> value) {
#if ONNX_ATTN_X86_LEVEL >= 4
  if constexpr (sizeof(T) == 4)
    return (Vector<T>)_mm512_roundscale_ps((__m512)value, 8);
  else
    return (Vector<T>)_mm512_roundscale_pd((__m512d)value, 8);
#elif ONNX_ATTN_X86_LEVEL >= 3
  if constexpr (sizeof(T) == 4)
    return (Vector<T>)_mm256_round_ps((__m256)value, 8);
  else
    return (Vector<T>)_mm256_round_pd((__m256d)value, 8);
#else
  const Vector<T> half = value < 0 ? splat<T>(T(-0.5)) : splat<T>(T(0.5));
  return __builtin_convertvector(__builtin_convertvector(value + half, Pack<int32_t, kLanes<T>>), Vector<T>);
#endif
}

// value * 2^power for a whole power; 0 where the power is at the format's minimum exponent or below.
template <class T>
ONNX_ATTN_INLINE Vector<T> scale_by_power(Vector<T> value, Vector<T> power) {
#if ONNX_ATTN_X86_LEVEL >= 4
  if constexpr (sizeof(T) == 4)
    return (Vector<T>)_mm512_scalef_ps((__m512)value, (__m512)power);
  else
    return (Vector<T>)_mm512_scalef_pd((__m512d)value, (__m512d)power);
#else
  constexpr int bias = sizeof(T) == 4 ? 127 : 1023, shift = sizeof(T) == 4 ? 23 : 52;
  const Integers<T> whole = __builtin_convertvector(__builtin_convertvector(power, Pack<int32_t, kLanes<T>>), Integers<T>);
  return value * (Vector<T>)((whole + bias) << shift);
#endif
}

// Constants of exp and tanh. (e^r - 1) / r is a polynomial fitted by Chebyshev interpolation on |r| <= ln(2) / 2.
template <class T>
struct Exponential;
template <>
struct Exponential<float> {
  static constexpr int terms = 6;
  static constexpr float coefficients[terms] = {0x1p+0f, 0x1p-1f, 0x1.55547cp-3f, 0x1.5554e8p-5f, 0x1.123dcep-7f, 0x1.6d4362p-10f};
  static constexpr float log2_e = 0x1.715476p+0f;
  static constexpr float ln2_high = 0x1.62ep-1f, ln2_low = 0x1.0bfbe8p-15f;  // whole multiples of ln2_high are exact
#if ONNX_ATTN_X86_LEVEL >= 4
  static constexpr float lowest = -110.0f;  // scalef passes through subnormals and ends in exactly 0
#else
  static constexpr float lowest = -88.2f;  // rounds to a power of -127, whose factor is exactly 0
#endif
  static constexpr float tanh_saturates = 10.0f;
};
template <>
struct Exponential<double> {
  static constexpr int terms = 11;
  static constexpr double coefficients[terms] = {0x1p+0,
                                                 0x1.0000000000005p-1,
                                                 0x1.5555555555557p-3,
                                                 0x1.5555555552079p-5,
                                                 0x1.11111111100cep-7,
                                                 0x1.6c16c17f52666p-10,
                                                 0x1.a01a01abef415p-13,
                                                 0x1.a019a63bb0bc2p-16,
                                                 0x1.71de021a90822p-19,
                                                 0x1.28a2f14d67e43p-22,
                                                 0x1.af4e196027428p-26};
  static constexpr double log2_e = 0x1.71547652b82fep+0;
  static constexpr double ln2_high = 0x1.62e42fefap-1, ln2_low = 0x1.cf79abc9e3b3ap-40;
#if ONNX_ATTN_X86_LEVEL >= 4
  static constexpr double lowest = -750.0;
#else
  static constexpr double lowest = -709.1;
#endif
  static constexpr double tanh_saturates = 20.0;
};

// Splits x = power * ln(2) + r and returns e^r - 1.
template <class T>
ONNX_ATTN_INLINE Vector<T> reduced_expm1(Vector<T> x, Vector<T>* power) {
  using E = Exponential<T>;
  *power = round_to_whole<T>(x * E::log2_e);
  const Vector<T> r = (x - *power * E::ln2_high) - *power * E::ln2_low;
  Vector<T> polynomial = splat<T>(E::coefficients[E::terms - 1]);
#pragma GCC unroll 16
  for (int i = E::terms - 2; i >= 0; --i) polynomial = polynomial * r + E::coefficients[i];
  return polynomial * r;
}

// e^x for x <= 0: exactly 0 from -infinity, NaN from NaN, within 1.5 units in the last place.
template <class T>
ONNX_ATTN_INLINE Vector<T> exp_of_nonpositive(Vector<T> x) {
  Vector<T> power;
  const Vector<T> rest = reduced_expm1<T>(maximum<T>(splat<T>(Exponential<T>::lowest), x), &power);
  return scale_by_power<T>(rest + T(1), power);
}

// Few units in the last place at every magnitude, since e^2|x| - 1 is formed without cancellation near 0.
template <class T>
ONNX_ATTN_INLINE Vector<T> tanh(Vector<T> x) {
  const Vector<T> magnitude = x < 0 ? -x : x;
  const Vector<T> saturated = splat<T>(Exponential<T>::tanh_saturates);
  const Vector<T> clamped = magnitude > saturated ? saturated : magnitude;  // keeps NaN
  Vector<T> power;
  const Vector<T> rest = reduced_expm1<T>(clamped + clamped, &power);
  const Vector<T> two_to_power = scale_by_power<T>(splat<T>(1), power);
  const Vector<T> expm1 = two_to_power * rest + (two_to_power - T(1));
  const Vector<T> result = expm1 / (expm1 + T(2));
  return x < 0 ? -result : result;
}

// ---- shuffles ------------------------------------------------------------------------------------------------------

// The lanes of `a` are numbered 0 ... n - 1, those of `b` n ... 2n - 1; Index::at(i) names the source of lane i.
template <class T, class Index, int... I>
ONNX_ATTN_INLINE Vector<T> shuffle_lanes(Vector<T> a, Vector<T> b, std::integer_sequence<int, I...>) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, Index::at(I)...);
#else
  return __builtin_shuffle(a, b, Integers<T>{Index::at(I)...});
#endif
}
template <class T, class Index>
ONNX_ATTN_INLINE Vector<T> shuffle(Vector<T> a, Vector<T> b) {
  return shuffle_lanes<T, Index>(a, b, std::make_integer_sequence<int, kLanes<T>>{});
}

template <int kDistance>
struct Exchange {
  static constexpr int at(int i) { return i ^ kDistance; }
};
template <class T>
ONNX_ATTN_INLINE T reduce_add(Vector<T> v) {
  if constexpr (kLanes<T> >= 16) v += shuffle<T, Exchange<8>>(v, v);
  if constexpr (kLanes<T> >= 8) v += shuffle<T, Exchange<4>>(v, v);
  if constexpr (kLanes<T> >= 4) v += shuffle<T, Exchange<2>>(v, v);
  v += shuffle<T, Exchange<1>>(v, v);
  return v[0];
}
template <class T>
ONNX_ATTN_INLINE T reduce_max(Vector<T> v) {
  if constexpr (kLanes<T> >= 16) v = maximum<T>(v, shuffle<T, Exchange<8>>(v, v));
  if constexpr (kLanes<T> >= 8) v = maximum<T>(v, shuffle<T, Exchange<4>>(v, v));
  if constexpr (kLanes<T> >= 4) v = maximum<T>(v, shuffle<T, Exchange<2>>(v, v));
  v = maximum<T>(v, shuffle<T, Exchange<1>>(v, v));
  return v[0];
}
