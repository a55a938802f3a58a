// kernel.inl: the attention kernel of one instruction set. The including file names it and its vectors:
//   ONNX_ATTN_ISA             namespace
//   ONNX_ATTN_X86_LEVEL       x86-64 level whose intrinsics may be used, 0 for none
//   ONNX_ATTN_VECTOR_BYTES    size of a register
//   ONNX_ATTN_PANEL_VECTORS   registers along a row of the product tile: 6 rows of 4 fit in 32 registers, 6 of 2 in 16
// Everything is in an unnamed namespace, so that no function compiled here for a newer CPU can be linked into another file.

// Sums are grouped by hand here, and exp and tanh split numbers exactly: the compiler must not regroup them.
#ifdef __clang__
#pragma clang fp reassociate(off) contract(fast)
#else
#pragma GCC optimize("no-associative-math")
#endif

namespace onnx_attn::cpu::ONNX_ATTN_ISA {
namespace {

#include "convert.inl"

#include "vector.inl"

#include "gemm.inl"

#include "few_rows.inl"

#include "pack.inl"

#include "scratch.inl"

#include "unit.inl"

#include "mask.inl"

#include "attend.inl"

constexpr Kernel kFloatKernel{scratch_bytes<float>, run_unit<float>, combine<float>};
constexpr Kernel kDoubleKernel{scratch_bytes<double>, run_unit<double>, combine<double>};

}  // namespace

const Kernel* kernel(DType compute) { return compute == DType::f64 ? &kDoubleKernel : &kFloatKernel; }

}  // namespace onnx_attn::cpu::ONNX_ATTN_ISA
