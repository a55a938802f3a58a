// attention_avx512.cpp: the attention kernel compiled for AVX-512 (x86-64-v4).
#ifdef __x86_64__

#include <immintrin.h>

#include <type_traits>
#include <utility>

#include "../key_range.h"
#include "blocking.h"
#include "storage.h"

#define ONNX_ATTN_ISA avx512
#define ONNX_ATTN_X86_LEVEL 4
#define ONNX_ATTN_VECTOR_BYTES 64
#define ONNX_ATTN_PANEL_VECTORS 4

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own AVX-512 headers: "undefined" vectors
#endif

// After every other include: only what follows may use the newer instructions.
#ifdef __clang__
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2,lzcnt,movbe,popcnt"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2,lzcnt,movbe,popcnt")
#endif

#include "kernel.inl"

#ifdef __clang__
#pragma clang attribute pop
#endif

#endif  // __x86_64__
