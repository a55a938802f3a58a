// wgmma.cuh: Hopper's warpgroup products, 64 rows by N columns by a depth of 16. Written by make_wgmma.py; do not edit.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace onnx_attn::device {

#define ONNX_ATTN_TILES_1(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define ONNX_ATTN_TILES_2(j) ONNX_ATTN_TILES_1(j), ONNX_ATTN_TILES_1(j + 1)
#define ONNX_ATTN_TILES_4(j) ONNX_ATTN_TILES_2(j), ONNX_ATTN_TILES_2(j + 2)
#define ONNX_ATTN_TILES_8(j) ONNX_ATTN_TILES_4(j), ONNX_ATTN_TILES_4(j + 4)
#define ONNX_ATTN_TILES_16(j) ONNX_ATTN_TILES_8(j), ONNX_ATTN_TILES_8(j + 8)

// d = a * b, or d += a * b to go on; a (Q) and b (K) in shared memory, 64 columns.
template <class Element>
__device__ __forceinline__ void multiply_keys(float (&d)[8][4], uint64_t a, uint64_t b, bool go_on) {
  if constexpr (std::is_same_v<Element, __half>)
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "
        "%26, %27, %28, %29, %30, %31"
        "}, %32, %33, p, 1, 1, 0, 0; }"
        : ONNX_ATTN_TILES_8(0)
        : "l"(a), "l"(b), "r"(static_cast<int>(go_on)));
  else
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "
        "%26, %27, %28, %29, %30, %31"
        "}, %32, %33, p, 1, 1, 0, 0; }"
        : ONNX_ATTN_TILES_8(0)
        : "l"(a), "l"(b), "r"(static_cast<int>(go_on)));
}

// d = a * b, or d += a * b to go on; a (Q) and b (K) in shared memory, 80 columns.
template <class Element>
__device__ __forceinline__ void multiply_keys(float (&d)[10][4], uint64_t a, uint64_t b, bool go_on) {
  if constexpr (std::is_same_v<Element, __half>)
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %42, 0; wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "
        "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39"
        "}, %40, %41, p, 1, 1, 0, 0; }"
        : ONNX_ATTN_TILES_8(0), ONNX_ATTN_TILES_2(8)
        : "l"(a), "l"(b), "r"(static_cast<int>(go_on)));
  else
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %42, 0; wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "
        "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39"
        "}, %40, %41, p, 1, 1, 0, 0; }"
        : ONNX_ATTN_TILES_8(0), ONNX_ATTN_TILES_2(8)
        : "l"(a), "l"(b), "r"(static_cast<int>(go_on)));
}

// d = a * b, or d += a * b to go on; a (Q) and b (K) in shared memory, 112 columns.
template <class Element>
__device__ __forceinline__ void multiply_keys(float (&d)[14][4], uint64_t a, uint64_t b, bool go_on) {
  if constexpr (std::is_same_v<Element, __half>)
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %58, 0; wgmma.mma_async.sync.aligned.m64n112k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "
        "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
        "%50, %51, %52, %53, %54, %55"
        "}, %56, %57, p, 1, 1, 0, 0; }"
        : ONNX_ATTN_TILES_8(0), ONNX_ATTN_TILES_4(8), ONNX_ATTN_TILES_2(12)
        : "l"(a), "l"(b), "r"(static_cast<int>(go_on)));
  else
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %58, 0; wgmma.mma_async.sync.aligned.m64n112k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "
        "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
        "%50, %51, %52, %53, %54, %55"
        "}, %56, %57, p, 1, 1, 0, 0; }"
        : ONNX_ATTN_TILES_8(0), ONNX_ATTN_TILES_4(8), ONNX_ATTN_TILES_2(12)
        : "l"(a), "l"(b), "r"(static_cast<int>(go_on)));
}

// d = a * b, or d += a * b to go on; a (Q) and b (K) in shared memory, 128 columns.
template <class Element>
__device__ __forceinline__ void multiply_keys(float (&d)[16][4], uint64_t a, uint64_t b, bool go_on) {
  if constexpr (std::is_same_v<Element, __half>)
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "
        "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
        "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, %64, %65, p, 1, 1, 0, 0; }"
        : ONNX_ATTN_TILES_16(0)
        : "l"(a), "l"(b), "r"(static_cast<int>(go_on)));
  else
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "
        "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
        "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, %64, %65, p, 1, 1, 0, 0; }"
        : ONNX_ATTN_TILES_16(0)
        : "l"(a), "l"(b), "r"(static_cast<int>(go_on)));
}

// d = a * b, or d += a * b to go on; a (P) in registers and b (V) in shared memory, 64 columns.
template <class Element>
__device__ __forceinline__ void multiply_values(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b, bool go_on) {
  if constexpr (std::is_same_v<Element, __half>)
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "
        "%26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1; }"
        : ONNX_ATTN_TILES_8(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(go_on)));
  else
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "
        "%26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1; }"
        : ONNX_ATTN_TILES_8(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(go_on)));
}

// d = a * b, or d += a * b to go on; a (P) in registers and b (V) in shared memory, 96 columns.
template <class Element>
__device__ __forceinline__ void multiply_values(float (&d)[12][4], const uint32_t (&a)[4], uint64_t b, bool go_on) {
  if constexpr (std::is_same_v<Element, __half>)
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %53, 0; wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "
        "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
        "}, {%48, %49, %50, %51}, %52, p, 1, 1, 1; }"
        : ONNX_ATTN_TILES_8(0), ONNX_ATTN_TILES_4(8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(go_on)));
  else
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %53, 0; wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "
        "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
        "}, {%48, %49, %50, %51}, %52, p, 1, 1, 1; }"
        : ONNX_ATTN_TILES_8(0), ONNX_ATTN_TILES_4(8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(go_on)));
}

// d = a * b, or d += a * b to go on; a (P) in registers and b (V) in shared memory, 128 columns.
template <class Element>
__device__ __forceinline__ void multiply_values(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b, bool go_on) {
  if constexpr (std::is_same_v<Element, __half>)
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "
        "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
        "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1; }"
        : ONNX_ATTN_TILES_16(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(go_on)));
  else
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "
        "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
        "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1; }"
        : ONNX_ATTN_TILES_16(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(go_on)));
}

// d = a * b, or d += a * b to go on; a (P) in registers and b (V) in shared memory, 192 columns.
template <class Element>
__device__ __forceinline__ void multiply_values(float (&d)[24][4], const uint32_t (&a)[4], uint64_t b, bool go_on) {
  if constexpr (std::is_same_v<Element, __half>)
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %101, 0; wgmma.mma_async.sync.aligned.m64n192k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "
        "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
        "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, "
        "%74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
        "}, {%96, %97, %98, %99}, %100, p, 1, 1, 1; }"
        : ONNX_ATTN_TILES_16(0), ONNX_ATTN_TILES_8(16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(go_on)));
  else
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %101, 0; wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "
        "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
        "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, "
        "%74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
        "}, {%96, %97, %98, %99}, %100, p, 1, 1, 1; }"
        : ONNX_ATTN_TILES_16(0), ONNX_ATTN_TILES_8(16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(go_on)));
}

// d = a * b, or d += a * b to go on; a (P) in registers and b (V) in shared memory, 256 columns.
template <class Element>
__device__ __forceinline__ void multiply_values(float (&d)[32][4], const uint32_t (&a)[4], uint64_t b, bool go_on) {
  if constexpr (std::is_same_v<Element, __half>)
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %133, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "
        "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
        "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, "
        "%74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, "
        "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, "
        "%118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, {%128, %129, %130, %131}, %132, p, 1, 1, 1; }"
        : ONNX_ATTN_TILES_16(0), ONNX_ATTN_TILES_16(16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(go_on)));
  else
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %133, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "
        "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
        "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, "
        "%74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, "
        "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, "
        "%118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, {%128, %129, %130, %131}, %132, p, 1, 1, 1; }"
        : ONNX_ATTN_TILES_16(0), ONNX_ATTN_TILES_16(16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(go_on)));
}

#undef ONNX_ATTN_TILES_1
#undef ONNX_ATTN_TILES_2
#undef ONNX_ATTN_TILES_4
#undef ONNX_ATTN_TILES_8
#undef ONNX_ATTN_TILES_16

}  // namespace onnx_attn::device
