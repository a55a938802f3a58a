// forward_sm90_limits.h: how the Hopper forward kernel cuts a problem up. Pure, so that it can be tested without a GPU.
#pragma once

#include "../plan.h"
#include "../problem.h"

namespace onnx_attn::forward_sm90_kernel {

enum class Dealing : int8_t {
  one_each,  // as many thread blocks as blocks of rows
  in_turn,   // a thread block per multiprocessor, every n-th block of rows
  drawn,     // the same, whichever is next
};

struct Tuning {
  bool large_tile = false;  // the larger of two tiles where a head size has two
  Dealing dealing = Dealing::one_each;
  int64_t band = 1;             // heads that are finished before the next ones start; see WorkOrder
  bool is_batch_first = false;  // heads are numbered so that the batch entries of a query head are neighbours
};

// Scores stay products of Q and K, and the scale goes into the exponent; see raw_unit.h.
bool scores_stay_raw(const Problem& problem);

// Why the scores cannot be made again by score_pass_sm90.cuh once Y is there; null: they can.
const char* score_pass_refusal(const Problem& problem);

Tuning choose_tuning(const Problem& problem, int sm_count);

}  // namespace onnx_attn::forward_sm90_kernel
