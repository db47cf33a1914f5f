// The Mem of warps that move rows for a crew (proto/crew.h): by ordinary loads and stores, or through a ring of shared
// memory by the copy engine of the SM.
#pragma once
#include "mem/cuda_warps.cuh"
#include "mem/fed_ring.cuh"
#include "mem/ring.cuh"
#include "mem/ring_mover.h"

namespace flexep {

/// Ordinary loads and stores: what was asked for is done when the warp goes on.
class LaneMover : public WarpMem {
 public:
  __device__ explicit LaneMover(const WarpMem& mem) : WarpMem(mem) {}
  __device__ void begin(int step) { step_ = step; }
  __device__ int done() const { return step_; }
  __device__ void finish() const {}

 private:
  int step_ = 0;
};

template <class Use>
using RingWarp = RingMover<WarpMem, Ring, Use>;

/// The feeder of a fed ring: a step is over once all readers have passed its pieces.
template <class Note>
class FeedMover : public WarpMem {
 public:
  static constexpr int kMaxStages = 16;

  __device__ FeedMover(const WarpMem& mem, const Feeder<Note>& feeder) : WarpMem(mem), feeder_(feeder) {}

  __device__ void begin(int step) { step_ = step; }
  __device__ int done() {
    const int over = feeder_.done();
    return over < feeder_.loaded() ? step_of_.get(over % kMaxStages) - 1 : step_;
  }
  __device__ void finish() { feeder_.finish(); }

  __device__ int piece_bytes() const { return feeder_.stage_bytes(); }
  __device__ int stages() const { return feeder_.num_stages(); }
  /// Lanes move pieces each for themselves, at most as many as there are stages: this one is the number-th of them.
  /// Then all say together how many they were.
  __device__ void move_as(int number, const void* from, int bytes, const Note& note) const {
    feeder_.load_as(number, from, bytes, note);
  }
  __device__ void moved_many(int pieces) {
    step_of_.set_some(feeder_.loaded(), pieces, step_);
    feeder_.loaded_many(pieces);
  }
  __device__ void end() { feeder_.end(); }

 private:
  Feeder<Note> feeder_;
  int step_ = 0;
  Uniform<int, kMaxStages> step_of_;  // by number of the piece
};

}  // namespace flexep
