// decode_job.cuh: what a launch of the decode kernel is given, and what a block keeps in shared memory.
#pragma once

#include "../device/decode_mask.cuh"
#include "../device/decode_result.cuh"

namespace onnx_attn::decode {

struct Job {
  Problem problem;
  ScoreRule rule;
  Partition cut;
  Dealing dealing;
  bool adds_up = false;  // blocks add up the chunks that they have of a line
  MaskLayout masks;
  int stages = 0;
  bool copies_past = false;
  Partials partials;
  int* part_counts = nullptr;  // of each line, by its first block; 0 between launches. Null: the combine kernel adds up
  int* tickets = nullptr;      // where lines are dealt out: how many blocks have asked for one; 0 between launches
};

// Warps of a block: first the eight that compute, then the helpers: one that prepares units, one that stores past rows where
// there are any, and the others load. Twelve warps in all are as many as can have 168 registers a thread.
inline constexpr int kHelpers = 4;
inline constexpr int kBlockThreads = 32 * (kComputingWarps + kHelpers);
__host__ __device__ inline int loaders(bool copies_past) { return kHelpers - (copies_past ? 2 : 1); }

// A unit as the preparer hands it to the computing warps.
struct PreparedUnit {
  bool exists;  // false: there are no more
  Unit unit;
  KeySpan whole;
  RowMask rows[kMaxBlockRows];
};

inline constexpr int kTicketSlots = 2;

struct Control {
  Handover<kMaxStages> ring;
  Handover<kUnitSlots> units;
  uint64_t written[kUnitSlots];       // the writer is done with the unit's tiles
  float2 stats[kComputingWarps][16];  // what a warp's rows are scaled to, and their sums
  PreparedUnit prepared[kUnitSlots];
  UnitTable table;
  Handover<kTicketSlots> ticket_ring;  // from the first loader to the others and the preparer
  int tickets[kTicketSlots];
  Unit shared_lines[2];  // the last unit in each line of which the block has a part: only its first and last can be such
  int shared_line_count;
  int blocks_before[2];  // that had stored their parts of these
};
static_assert(sizeof(Control) <= kControlBytes);

template <int kHeadSize>
struct SharedMemory {
  using S = Stage<kHeadSize>;
  uint8_t* ring;  // stages: K, V, masks
  int stage_bytes;
  uint8_t* queries;  // for each unit slot, the rows of a block, swizzled
  int query_bytes;   // of a slot
  Control* control;

  __device__ __forceinline__ explicit SharedMemory(const Job& job) {
    extern __shared__ __align__(128) uint8_t bytes[];
    ring = bytes;
    stage_bytes = S::kBytes + job.masks.bytes;
    queries = ring + job.stages * stage_bytes;
    query_bytes = job.cut.block_rows() * kHeadSize * 2;
    control = reinterpret_cast<Control*>(queries + kUnitSlots * query_bytes);
  }
  __device__ __forceinline__ uint8_t* stage(int index) const { return ring + index * stage_bytes; }
  __device__ __forceinline__ uint32_t staged_queries(int slot) const { return shared_address(queries) + slot * query_bytes; }
};

// Tiles start at multiples of their size, so that a row's bits do not depend on where its unit begins.
template <int kHeadSize>
__device__ __forceinline__ int first_tile(const Unit& unit) {
  return unit.begin / Stage<kHeadSize>::kKeys * Stage<kHeadSize>::kKeys;
}

// A warp's view of what is dealt out. The first loader takes the tickets, one ahead, since the answer queues behind the tiles that are on
// their way, and shows them to the others.
class Dealer {
 public:
  __device__ __forceinline__ Dealer(const Job& job, Control& control, bool takes_tickets)
      : tickets_(job.tickets), control_(control), takes_tickets_(takes_tickets) {}

  // When the kernel before has ended.
  __device__ __forceinline__ void take_ahead() {
    if (takes_tickets_ && tickets_ && lane_index() == 0) ticket_ = device::take_on_device(tickets_);
  }
  // What the block is dealt next, after a unit with which its share ended. False when there is nothing.
  __device__ __forceinline__ bool start_next(UnitWalk& walk) {
    if (!tickets_) return false;
    const int slot = place_.index();
    int ticket = 0;
    if (takes_tickets_) {
      ticket = __shfl_sync(~0u, ticket_, 0);
      place_.wait_empty(control_.ticket_ring);
      if (lane_index() == 0) {
        control_.tickets[slot] = ticket;
        if (ticket == walk.last_ticket()) *tickets_ = 0;
      }
      arrive_as_warp(control_.ticket_ring.full[slot]);
    } else {
      place_.wait_full(control_.ticket_ring);
      ticket = control_.tickets[slot];
      arrive_as_warp(control_.ticket_ring.empty[slot]);
    }
    place_.advance(kTicketSlots);
    return walk.start_dealt(ticket);
  }

 private:
  int* tickets_;
  Control& control_;
  bool takes_tickets_;
  int ticket_ = 0;
  RingPlace place_;
};

// Calls body(unit) for each unit of the block, in order.
template <class Body>
__device__ __forceinline__ void for_each_unit(const Job& job, const UnitTable& table, Dealer& dealer, Body&& body) {
  UnitWalk walk;
  Unit unit;
  walk.start(job.problem, job.cut, table, job.dealing);
  do {
    while (walk.next(job.problem, job.cut, table, unit)) body(unit);
  } while (dealer.start_next(walk));
}

}  // namespace onnx_attn::decode
