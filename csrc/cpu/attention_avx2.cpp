// attention_avx2.cpp: the attention kernel compiled for AVX2 (x86-64-v3).
#ifdef __x86_64__

#include <immintrin.h>

#include <type_traits>
#include <utility>

#include "../key_range.h"
#include "blocking.h"
#include "storage.h"

#define ONNX_ATTN_ISA avx2
#define ONNX_ATTN_X86_LEVEL 3
#define ONNX_ATTN_VECTOR_BYTES 32
#define ONNX_ATTN_PANEL_VECTORS 2

// After every other include: only what follows may use the newer instructions.
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi,bmi2,lzcnt,movbe,popcnt"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,bmi,bmi2,lzcnt,movbe,popcnt")
#endif

#include "kernel.inl"

#ifdef __clang__
#pragma clang attribute pop
#endif

#endif  // __x86_64__
