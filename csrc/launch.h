// launch.h: one declaration for each thing that can run. CUDA functions take a cudaStream_t as void* and return a cudaError_t as int.
#pragma once

#include <cstdint>
#include <functional>

#include "plan.h"
#include "problem.h"
#include "scatter.h"

namespace onnx_attn {

namespace cuda {

int query_device(int index, Device* device);  // kernels/device_query.cu
const char* error_text(int error);

int append(const Problem& problem, void* stream);                                               // kernels/append.cu
int general(const Problem& problem, const Plan& plan, void* stream);                            // kernels/general.cu
int decode(const Problem& problem, const Device& device, void* workspace, void* stream);        // kernels/decode.cu
int forward_short(const Problem& problem, const Device& device, void* stream);                  // kernels/forward_short_sm90.cu
int forward_sm90(const Problem& problem, const Device& device, void* workspace, void* stream);  // kernels/forward_sm90.cu
int forward_sm80(const Problem& problem, const Plan& plan, void* stream);                       // kernels/forward_sm80.cu
int forward_float32(const Problem& problem, const Plan& plan, void* workspace, void* stream);   // kernels/forward_float32.cu
int scores(const Problem& problem, const Device& device, void* workspace, void* stream);        // kernels/scores.cu
int scores_sm90(const Problem& problem, const Device& device, void* workspace, void* stream);   // kernels/scores_sm90.cu
int tensor_scatter(const Scatter& scatter, void* stream);                                       // kernels/scatter.cu
int valid_kv_length(const ValidLength& problem, void* stream);                                  // kernels/scatter.cu

// Pure, and there without CUDA too. A refusal is null when the kernel can run the problem, else the reason in words.
const char* decode_refusal(const Problem& problem);         // kernels/decode_limits.cpp
const char* forward_short_refusal(const Problem& problem);  // kernels/forward_short_limits.cpp
const char* forward_sm90_refusal(const Problem& problem);   // kernels/forward_sm90_limits.cpp
int64_t forward_sm90_workspace_bytes(const Problem& problem, const Device& device);
const char* forward_sm80_refusal(const Problem& problem);                           // kernels/forward_sm80_limits.cpp
const char* forward_float32_refusal(const Problem& problem, const Device& device);  // kernels/forward_float32_limits.cpp
int64_t forward_float32_workspace_bytes(const Problem& problem);
const char* scores_refusal(const Problem& problem, const Device& device);  // kernels/scores_limits.cpp
int64_t scores_workspace_bytes(const Problem& problem);
int64_t decode_workspace_bytes(const Problem& problem, const Device& device);  // kernels/decode_limits.cpp

}  // namespace cuda

namespace cpu {

// Runs body(begin, end) over chunks of [0, count), on as many threads as the host framework allows. Must not throw.
using ParallelFor = std::function<void(int64_t count, const std::function<void(int64_t, int64_t)>& body)>;

void append(const Problem& problem, const ParallelFor& parallel_for);               // cpu/append.cpp
void attention(const Problem& problem, const ParallelFor& parallel_for);            // cpu/attention.cpp
void tensor_scatter(const Scatter& scatter, const ParallelFor& parallel_for);       // cpu/scatter.cpp
void valid_kv_length(const ValidLength& problem, const ParallelFor& parallel_for);  // cpu/scatter.cpp

}  // namespace cpu

}  // namespace onnx_attn
