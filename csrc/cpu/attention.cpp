// attention.cpp: cuts a call into units of work, picks the instruction set, and runs the units on the host's threads.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>

#include "../launch.h"
#include "blocking.h"

namespace onnx_attn::cpu {
namespace {

// Below this many multiply-adds waking other threads takes longer than the work.
constexpr double kSerialWork = 5e5;
constexpr std::align_val_t kAlignment{64};

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

const Kernel* pick_kernel(DType compute) {
#ifdef __x86_64__
  static const int level = [] {
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const int best = has_avx512 ? 4 : has_avx2 ? 3 : 0;
    const char* wanted = std::getenv("TORCH_ONNX_ATTN_CPU_LEVEL");  // for tests: 0, 3 or 4
    return wanted ? std::min(best, std::atoi(wanted)) : best;
  }();
  if (level >= 4) return avx512::kernel(compute);
  if (level >= 3) return avx2::kernel(compute);
#endif
  return baseline::kernel(compute);
}

struct AlignedMemory {
  explicit AlignedMemory(size_t bytes) : data(static_cast<char*>(::operator new(bytes, kAlignment, std::nothrow))) {}
  ~AlignedMemory() { ::operator delete(data, kAlignment); }
  AlignedMemory(const AlignedMemory&) = delete;
  AlignedMemory& operator=(const AlignedMemory&) = delete;
  char* data;  // null: there is none left
};

}  // namespace

Blocking make_blocking(const Problem& problem) {
  Blocking blocking;
  blocking.group = problem.kv_heads > 0 ? problem.q_heads / problem.kv_heads : 1;
  blocking.rows = problem.q_len * blocking.group;
  blocking.few_rows = blocking.rows <= kFewRows;
  // Wide blocks pack each key tile less often; narrow ones give more units where there are few.
  const bool many_units = problem.kv_heads * (blocking.rows / 128) >= 16;
  blocking.row_block = std::min<int64_t>(blocking.rows, many_units ? 128 : 64);
  blocking.row_blocks = blocking.rows > 0 ? (blocking.rows + blocking.row_block - 1) / blocking.row_block : 0;
  // Final weights need all keys in one unit.
  const bool splits = blocking.row_blocks == 1 && problem.score_mode != ScoreMode::weights;
  blocking.key_splits = splits ? std::max<int64_t>(1, (problem.kv_len + kSplitKeys - 1) / kSplitKeys) : 1;
  blocking.units = problem.batch * problem.kv_heads * blocking.key_splits * blocking.row_blocks;

  blocking.padded_head = round_up(problem.head_size, kPad);
  blocking.padded_v_head = round_up(problem.v_head_size, kPad);
  blocking.partial_row = blocking.padded_v_head + kPad;
  if (blocking.key_splits > 1) {
    blocking.partial_elements = problem.batch * problem.kv_heads * blocking.key_splits * blocking.rows * blocking.partial_row;
  }
  blocking.compute_size = problem.compute == DType::f64 ? 8 : 4;
  return blocking;
}

void attention(const Problem& problem, const ParallelFor& parallel_for) {
  const Blocking blocking = make_blocking(problem);
  if (blocking.units == 0) return;
  const Kernel* kernel = pick_kernel(problem.compute);
  const size_t scratch_bytes = kernel->scratch_bytes(blocking);

  const bool splits = blocking.key_splits > 1;
  const int64_t heads = problem.batch * problem.kv_heads;
  const AlignedMemory partials(splits ? blocking.partial_elements * blocking.compute_size : 0);
  std::unique_ptr<std::atomic<int64_t>[]> unfinished;
  if (splits) {
    if (!partials.data) throw std::bad_alloc();
    unfinished.reset(new std::atomic<int64_t>[heads]);
    for (int64_t i = 0; i < heads; ++i) unfinished[i].store(blocking.key_splits, std::memory_order_relaxed);
  }

  // Threads take the next unit when they are free, whatever chunk they were given: units differ in length, and what a unit
  // computes does not depend on who runs it.
  std::atomic<int64_t> next{0};
  std::atomic<bool> out_of_memory{false};
  const auto body = [&](int64_t, int64_t) {
    int64_t unit = next.fetch_add(1, std::memory_order_relaxed);
    if (unit >= blocking.units) return;
    const AlignedMemory scratch(scratch_bytes);
    if (!scratch.data) {
      out_of_memory = true;
      return;
    }
    for (; unit < blocking.units; unit = next.fetch_add(1, std::memory_order_relaxed)) {
      kernel->run_unit(problem, blocking, unit, scratch.data, partials.data);
      if (!splits) continue;
      // The thread that ends the last split of a head joins them.
      const int64_t head = unit / blocking.key_splits;
      if (unfinished[head].fetch_sub(1, std::memory_order_acq_rel) == 1) kernel->combine(problem, blocking, head, partials.data);
    }
  };
  const double work =
      static_cast<double>(problem.batch) * problem.kv_heads * blocking.rows * problem.kv_len * (problem.head_size + problem.v_head_size);
  if (blocking.units == 1 || work < kSerialWork)
    body(0, blocking.units);
  else
    parallel_for(blocking.units, body);
  if (out_of_memory) throw std::bad_alloc();
}

}  // namespace onnx_attn::cpu
