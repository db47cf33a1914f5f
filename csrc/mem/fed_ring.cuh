// A ring of stages in shared memory between a warp that fills them, the feeder, and a team of warps that read each of
// them together. With a piece goes a note. Stages pass in order:
//
//     feeder                                        every reader, at its own pace
//     load_as(n, from, ...)     -- full -->         next(note): the piece and its note are there
//     done(): read by all       <-- empty --        pass(): what was made of it is stored, too
//     end()                     -- full -->         next(note): false
//
// A copy that was issued ends, and readers wait for nothing else: no wait here has a deadline.
#pragma once
#include <cstddef>
#include <cstdint>

#include "base/layout.h"
#include "mem/cuda.cuh"

namespace flexep {

/// The warps of a CTA that share a ring: neighbours, the feeder first.
struct FedTeam {
  static constexpr int kMostTeams = 15;  // of a CTA: named barriers, without that of __syncthreads

  int warp;     // the caller's
  int barrier;  // the team's own: 1 to kMostTeams
  int readers;

  __device__ int threads() const { return 32 * (1 + readers); }
  __device__ bool feeds() const { return warp == 0; }
  /// Of a reader's lane, among all of them.
  __device__ int lane() const { return (warp - 1) * 32 + static_cast<int>(threadIdx.x) % 32; }
};

/// Where a ring's parts lie in its shared memory.
template <class Note>
struct FedLayout {
  static constexpr std::size_t kAlign = 128;

  /// What belongs to a stage beside its bytes. Together, so that a warp keeps one address for all of it.
  struct Beside {
    std::uint64_t full, empty;  // mbarriers
    Note note;
    bool ends;
  };

  int stages, stage_bytes;  // stage_bytes: a multiple of 16
  Span<char> rows;
  Span<Beside> beside;
  std::size_t bytes;

  FLEXEP_HD constexpr FedLayout(int num_stages, int bytes_a_stage)
      : stages(num_stages), stage_bytes(bytes_a_stage), bytes(0) {
    Cursor cursor;
    rows = cursor.take<char>(static_cast<std::size_t>(stages) * stage_bytes, kAlign);
    beside = cursor.take<Beside>(stages);
    bytes = cursor.bytes(kAlign);
  }
};

/// What feeder and readers have in common: where the ring lies, and the stage that is next for the caller. `at`: where
/// in the CTA's dynamic shared memory.
template <class Note>
class FedRing {
 protected:
  using Layout = FedLayout<Note>;

  __device__ FedRing(const Layout& layout, std::size_t at)
      : stages(layout.stages),
        stage_bytes(layout.stage_bytes),
        rows_at(static_cast<int>(at + layout.rows.at)),
        beside_at(static_cast<int>(at + layout.beside.at)) {}

  // Out of offsets, so that the compiler knows what memory it is.
  __device__ static char* memory() {
    extern __shared__ __align__(128) char shared[];
    return shared;
  }
  __device__ char* row(int stage) const { return memory() + rows_at + stage * stage_bytes; }
  __device__ typename Layout::Beside& beside(int stage) const {
    return reinterpret_cast<typename Layout::Beside*>(memory() + beside_at)[stage];
  }
  __device__ std::uint64_t* full(int stage) const { return &beside(stage).full; }
  __device__ std::uint64_t* empty(int stage) const { return &beside(stage).empty; }

  /// Both sides meet before either looks at an mbarrier.
  __device__ static void meet(const FedTeam& team) { ptx::barrier_sync(team.barrier, team.threads()); }
  __device__ static bool leads() { return threadIdx.x % 32 == 0; }
  __device__ static void wait(std::uint64_t* barrier, int parity) {
    while (!ptx::mbarrier_try_wait_parity_acquire_cta(barrier, parity)) {
    }
  }
  /// A stage, and the parity of the phase that is waited for there.
  struct Turn {
    int stage, parity;
    __device__ void advance(int stages) { *this = later(1, stages); }
    /// `pieces` later, at most `stages`.
    __device__ Turn later(int pieces, int stages) const {
      const int at = stage + pieces;
      return at < stages ? Turn{at, parity} : Turn{at - stages, parity ^ 1};
    }
  };

  const int stages, stage_bytes;
  const int rows_at, beside_at;
};

/// All lanes of the feeder's warp call together.
template <class Note>
class Feeder : FedRing<Note> {
  using Base = FedRing<Note>;

 public:
  __device__ Feeder(const FedLayout<Note>& layout, std::size_t at, const FedTeam& team) : Base(layout, at) {
    if (this->leads()) {
      for (int stage = 0; stage < this->stages; ++stage) {
        ptx::mbarrier_init(this->full(stage), 1);
        ptx::mbarrier_init(this->empty(stage), 32 * team.readers);
      }
      ptx::fence_mbarrier_init_release_cluster();
    }
    this->meet(team);
  }

  __device__ int stage_bytes() const { return Base::stage_bytes; }
  __device__ int num_stages() const { return Base::stages; }
  __device__ int loaded() const { return loaded_; }

  /// By one lane: global memory, a peer's too, to the stage of the number-th piece from now on, as soon as that is
  /// free. Lanes load at most as many pieces as there are stages, all of the first so many, and then say so together.
  __device__ void load_as(int number, const void* from, int bytes, const Note& note) const {
    const typename Base::Turn turn = next_.later(number, this->stages);
    if (loaded_ + number - this->stages >= done_) this->wait(this->empty(turn.stage), turn.parity ^ 1);
    std::uint64_t* const full = this->full(turn.stage);
    this->beside(turn.stage).note = note;
    this->beside(turn.stage).ends = false;
    ptx::mbarrier_arrive_expect_tx_release_cta(full, bytes);
    ptx::bulk_load(this->row(turn.stage), from, bytes, full);
  }
  __device__ void loaded_many(int pieces) {
    __syncwarp();
    loaded_ += pieces;
    next_ = next_.later(pieces, this->stages);
    const int passed = loaded_ - this->stages - done_;  // as lanes have seen
    if (passed <= 0) return;
    done_ += passed;
    oldest_ = oldest_.later(passed, this->stages);
  }
  /// Pieces, from the first on, that every reader has passed, alike on all lanes. Waits for none.
  __device__ int done() {
    while (done_ < loaded_ && __all_sync(kAllLanes, ptx::mbarrier_test_wait_parity_acquire_cta(
                                                        this->empty(oldest_.stage), oldest_.parity)))
      pass();
    return done_;
  }
  /// Waits until all are.
  __device__ void finish() {
    while (done_ < loaded_) finish_one();
  }
  /// Nothing comes any more.
  __device__ void end() {
    acquire();
    if (!this->leads()) return;
    this->beside(next_.stage).ends = true;
    ptx::mbarrier_arrive_release_cta(this->full(next_.stage));
  }

 private:
  static constexpr unsigned kAllLanes = 0xffffffffu;

  /// The next stage is free. No phase of a stage begins before the one before it has been looked at, so that its parity
  /// says which one is over.
  __device__ void acquire() {
    if (loaded_ - done_ == this->stages) finish_one();
  }
  __device__ void finish_one() {
    this->wait(this->empty(oldest_.stage), oldest_.parity);
    pass();
  }
  __device__ void pass() {
    ++done_;
    oldest_.advance(this->stages);
  }

  typename Base::Turn next_{0, 0}, oldest_{0, 0};
  int loaded_ = 0, done_ = 0;
};

/// All lanes of a reader's warp call together.
template <class Note>
class Reader : FedRing<Note> {
  using Base = FedRing<Note>;

 public:
  __device__ Reader(const FedLayout<Note>& layout, std::size_t at, const FedTeam& team) : Base(layout, at) {
    this->meet(team);
  }

  /// Waits for the next piece and its note; false if none comes any more, and then the note is not one.
  __device__ bool next(Note& note) const {
    this->wait(this->full(turn_.stage), turn_.parity);
    const auto& beside = this->beside(turn_.stage);
    note = beside.note;
    return !beside.ends;
  }
  __device__ const char* piece() const { return this->row(turn_.stage); }
  /// What this warp has read and stored comes before whatever the feeder does when it learns of it.
  __device__ void pass() {
    // Every lane for itself: one for its warp, behind a __syncwarp, is slower (docs/decisions/crews.md), and racecheck
    // does not know what it says.
    ptx::mbarrier_arrive_release_cta(this->empty(turn_.stage));
    turn_.advance(this->stages);
  }

 private:
  typename Base::Turn turn_{0, 0};
};

}  // namespace flexep
