// convert.cuh: element types on the device: conversion with one rounding, and the step from a run-time DType to a type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "../mask.h"

namespace onnx_attn::device {

// Between any two floating types, rounded once to nearest even. Narrow types pass through float only where that is exact.
template <class To, class From>
__device__ __forceinline__ To convert(From value) {
  if constexpr (std::is_same_v<To, From>) {
    return value;
  } else if constexpr (std::is_same_v<From, __half>) {
    return convert<To>(__half2float(value));
  } else if constexpr (std::is_same_v<From, __nv_bfloat16>) {
    return convert<To>(__bfloat162float(value));
  } else if constexpr (std::is_same_v<To, __half>) {
    if constexpr (std::is_same_v<From, double>)
      return __double2half(value);
    else
      return __float2half_rn(value);
  } else if constexpr (std::is_same_v<To, __nv_bfloat16>) {
    if constexpr (std::is_same_v<From, double>)
      return __double2bfloat16(value);
    else
      return __float2bfloat16_rn(value);
  } else {
    return static_cast<To>(value);
  }
}

// Calls body(T()) with the type that `dtype` names. A uniform branch: take it around a loop, not inside one.
template <class Body>
__device__ __forceinline__ void with_float_type(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::f64: return body(double());
    case DType::f32: return body(float());
    case DType::f16: return body(__half());
    case DType::bf16: return body(__nv_bfloat16());
    default: return;
  }
}

template <class Body>
__device__ __forceinline__ void with_integer_type(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::boolean: return body(uint8_t());
    case DType::i32: return body(int32_t());
    case DType::i64: return body(int64_t());
    default: return;
  }
}

}  // namespace onnx_attn::device
