// attention_baseline.cpp: the attention kernel in 128-bit vectors, for any CPU.
#include <type_traits>
#include <utility>

#include "../key_range.h"
#include "blocking.h"
#include "storage.h"

#define ONNX_ATTN_ISA baseline
#define ONNX_ATTN_X86_LEVEL 0
#define ONNX_ATTN_VECTOR_BYTES 16
#ifdef __aarch64__
#define ONNX_ATTN_PANEL_VECTORS 4
#else
#define ONNX_ATTN_PANEL_VECTORS 2
#endif

#include "kernel.inl"
