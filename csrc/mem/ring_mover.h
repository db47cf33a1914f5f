// The Mover of a crew (proto/crew.h) whose rows pass a ring of stages (mem/ring.cuh, or the simulator's): loads run
// ahead of what is done with the rows, and stores are found in place later, both over the ends of steps.
#pragma once
#include <cstddef>

#include "base/hd.h"
#include "proto/crew.h"

namespace flexep {

/// N values in registers: an index that is not known at compile time picks one without a trip through local memory.
template <class T, int N>
class Registers {
 public:
  FLEXEP_HD void set(int index, T value) {
    FLEXEP_HD_UNROLL
    for (int i = 0; i < N; ++i)
      if (i == index) values_[i] = value;
  }
  FLEXEP_HD T get(int index) const {
    T value = values_[0];
    FLEXEP_HD_UNROLL
    for (int i = 1; i < N; ++i)
      if (i == index) value = values_[i];
    return value;
  }

 private:
  T values_[N] = {};
};

/// N values that are the same on all lanes: on a GPU lane i keeps value i. All lanes call together.
template <class T, int N>
class Uniform {
 public:
#ifdef __CUDA_ARCH__
  static_assert(N <= 32);

  __device__ void set(int index, const T& value) {
    if (static_cast<int>(threadIdx.x) % 32 == index) value_ = value;
  }
  /// Of `count` values from `first` on, around N, which is a power of two.
  __device__ void set_some(int first, int count, const T& value) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (lane < N && ((lane - first) & (N - 1)) < count) value_ = value;
  }
  __device__ T get(int index) const { return __shfl_sync(0xffffffffu, value_, index); }

 private:
  T value_ = {};
#else
  FLEXEP_HD void set(int index, const T& value) { values_[index] = value; }
  FLEXEP_HD void set_some(int first, int count, const T& value) {
    for (int i = first; i < first + count; ++i) values_[i & (N - 1)] = value;
  }
  FLEXEP_HD T get(int index) const { return values_[index]; }

 private:
  T values_[N] = {};
#endif
};

/// When a step is over: once its rows have been read, or once they are in place as well.
enum class Until { read, stored };

/// Rows in pieces of at most a stage, first in, first out. `Use` is told where each piece lies and what was said of its
/// place: use(ring, stage, place, offset, bytes) stores the stage or skips it. Use::Places<N> keeps what was said.
template <class Mem, class Ring, class Use>
class RingMover : public Mem {
 public:
  static constexpr int kMaxStages = 8;

  FLEXEP_HD RingMover(const Mem& mem, const Ring& ring, int row_bytes, Until until, const Use& use)
      : Mem(mem), ring_(ring), use_(use), until_(until), row_bytes_(row_bytes) {}

  FLEXEP_HD void begin(int step) { step_ = step; }
  FLEXEP_HD int done() {
    // Stores but the youngest have had time: hardly anybody waits for them here.
    const int late = until_ == Until::stored ? kLate : 0;
    if (until_ == Until::stored) ring_.drain(late);
    if (over_ < ring_.passed() - late) over_ = ring_.passed() - late;
    return over_ < loaded_ ? step_of_.get(over_ & (kTags - 1)) - 1 : step_;
  }
  FLEXEP_HD void finish() {
    while (ring_.held() > 0) pass_one();
    ring_.drain();
    over_ = loaded_;
  }

  FLEXEP_HD void put(int to, std::size_t at, const void* from, std::size_t bytes) {
    void* const place = Mem::target(to, at, bytes);
    move(from, ring_.leads() ? static_cast<char*>(place) : nullptr);
  }
  FLEXEP_HD void move(const void* from, typename Use::Place place) {
    const int stages = ring_.stages(), most = ring_.stage_bytes();
    for (int offset = 0; offset < row_bytes_; offset += most) {
      if (ring_.held() >= (stages > 1 ? stages - 1 : 1)) pass_one();
      ring_.acquire();
      places_.set(ring_.next(), place);
      offsets_.set(ring_.next(), offset);
      step_of_.set(loaded_ & (kTags - 1), step_);
      ring_.load(static_cast<const char*>(from) + offset, piece(offset));
      ++loaded_;
    }
  }

 private:
  static constexpr int kLate = 2, kTags = 16;  // more than pieces that are held or stored late
  static_assert(kTags >= kMaxStages + kLate && (kTags & (kTags - 1)) == 0);

  FLEXEP_HD int piece(int offset) const {
    const int left = row_bytes_ - offset, most = ring_.stage_bytes();
    return left < most ? left : most;
  }
  FLEXEP_HD void pass_one() {
    const int oldest = ring_.oldest(), offset = offsets_.get(oldest);
    const char* const stage = ring_.wait();
    use_(ring_, stage, places_.get(oldest), offset, piece(offset));
  }

  Ring ring_;
  Use use_;
  const Until until_;
  const int row_bytes_;
  int step_ = 0, loaded_ = 0, over_ = 0;              // pieces loaded, and those whose part of a step is over
  typename Use::template Places<kMaxStages> places_;  // by stage
  Uniform<int, kMaxStages> offsets_;
  Uniform<int, kTags> step_of_;  // by number of the piece
};

/// Stores each piece: to an address on each lane, null for none.
struct StoreEach {
  using Place = char*;
  template <int N>
  using Places = Registers<Place, N>;

  template <class Ring>
  FLEXEP_HD void operator()(Ring& ring, const char*, Place to, int offset, int bytes) const {
    ring.store_each(to == nullptr ? nullptr : to + offset, bytes);
  }
};

}  // namespace flexep
