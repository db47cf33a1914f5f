// The Mem of warps that move rows for a crew (proto/crew.h): by ordinary loads and stores, or through a ring of shared
// memory by the copy engine of the SM.
#pragma once
#include "mem/cuda_warps.cuh"
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

}  // namespace flexep
