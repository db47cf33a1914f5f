// A warp's ring of stages in shared memory, through which the copy engine of its SM (TMA) moves rows:
//
//   acquire()       the next stage is free: what was stored out of it has been read
//   load(from, n)   global memory, a peer's too -> that stage, asynchronous
//   wait()          the oldest loaded stage is full, so what it was loaded from has been read; its address
//   store(to, n)    that stage -> global memory, a peer's too, asynchronous; wait and store come in pairs
//   store_each(to, n)   the same to a place for each lane, null for none
//   skip()          to no place: the warp has read the stage. A ring either stores all of its stages or skips all.
//   drain(n)        all stores but the youngest n are in place; Mem::drain of proto/exchange.h is drain(0)
//   abandon()       the way out when a wait failed: nothing is in flight any more
//
// All lanes of the warp call together; lane 0 issues loads, every lane its own stores. Loads may run ahead of stores:
// up to `stages` rows are held, and the other stages are being stored meanwhile. No wait here has a deadline: a copy
// that was issued ends.
#pragma once
#include <cstddef>
#include <cstdint>

#include "base/layout.h"
#include "mem/cuda.cuh"

namespace flexep {

/// Where a ring's parts lie in its shared memory.
struct RingLayout {
  static constexpr std::size_t kAlign = 128;

  int stages, stage_bytes;  // stage_bytes: a multiple of 16
  Span<char> rows;
  Span<std::uint64_t> full;  // an mbarrier a stage
  std::size_t bytes;

  FLEXEP_HD constexpr RingLayout(int num_stages, int bytes_a_stage)
      : stages(num_stages), stage_bytes(bytes_a_stage), bytes(0) {
    Cursor cursor;
    rows = cursor.take<char>(static_cast<std::size_t>(stages) * stage_bytes, kAlign);
    full = cursor.take<std::uint64_t>(stages);
    bytes = cursor.bytes(kAlign);
  }
};

class Ring {
 public:
  __device__ Ring(const RingLayout& layout, char* shared)
      : layout_(layout),
        rows_(shared + layout.rows.at),
        full_(reinterpret_cast<std::uint64_t*>(shared + layout.full.at)) {
    if (lanes_.rank() == 0) {
      for (int stage = 0; stage < layout_.stages; ++stage) ptx::mbarrier_init(full_ + stage, 1);
      ptx::fence_mbarrier_init_release_cluster();
    }
    lanes_.sync();
  }

  __device__ int stages() const { return layout_.stages; }
  __device__ int stage_bytes() const { return layout_.stage_bytes; }
  /// Whether this lane is the one that names a single place.
  __device__ bool leads() const { return lanes_.rank() == 0; }
  /// The stage of the next load, and the oldest one that is held.
  __device__ int next() const { return next_; }
  __device__ int oldest() const { return oldest_; }
  /// Rows loaded and not yet stored.
  __device__ int held() const { return loads_ - stores_; }

  __device__ void acquire() const {
    // The groups younger than the one that last used the stage may go on.
    if (loads_ < layout_.stages) return;
    ptx::bulk_wait_group_read(stores_ + layout_.stages - 1 - loads_);
    lanes_.sync();  // every lane has waited for its own
  }
  __device__ void load(const void* from, int bytes) {
    if (lanes_.rank() == 0) {
      ptx::mbarrier_arrive_expect_tx_release_cta(full_ + next_, bytes);
      ptx::bulk_load(stage(next_), from, bytes, full_ + next_);
    }
    ++loads_;
    next_ = next_ + 1 == layout_.stages ? 0 : next_ + 1;
  }
  __device__ char* wait() const {
    while (!ptx::mbarrier_try_wait_parity_acquire_cta(full_ + oldest_, parity_)) {
    }
    return stage(oldest_);
  }
  __device__ void store(void* to, int bytes) { store_each(lanes_.rank() == 0 ? to : nullptr, bytes); }
  __device__ void store_each(void* to, int bytes) {
    lanes_.sync();  // no lane still waits for, or reads, the stage that is about to be passed on
    if (to != nullptr) ptx::bulk_store(to, stage(oldest_), bytes);
    ptx::bulk_commit_group();  // on every lane, empty or not: lanes count alike
    pass();
  }
  __device__ void skip() {
    lanes_.sync();
    pass();
  }

  /// Rows stored or skipped so far.
  __device__ int passed() const { return stores_; }
  __device__ void drain(int pending = 0) const {
    ptx::bulk_wait_group(pending);
    lanes_.sync();
  }
  __device__ void abandon() {
    for (; held() > 0; ++stores_, advance()) wait();
    drain();
  }

 private:
  __device__ void pass() {
    ++stores_;
    advance();
  }
  __device__ void advance() {
    if (++oldest_ == layout_.stages) oldest_ = 0, parity_ ^= 1;
  }
  __device__ char* stage(int index) const {
    return rows_ + static_cast<std::size_t>(index) * layout_.stage_bytes;
  }

  const RingLayout layout_;
  Warp lanes_;
  char* const rows_;
  std::uint64_t* const full_;
  int loads_ = 0, stores_ = 0;  // so far; stores or skips
  int next_ = 0, oldest_ = 0,
      parity_ = 0;  // stage of the next load; of the next store, and that stage's phase
};

}  // namespace flexep
