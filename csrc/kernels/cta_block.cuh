// A CTA as a block of the plan.
#pragma once
#include <cstdint>

#include "plan/block.h"

namespace flexep {

/// See plan/block.h. The CTA may play any block of any number of them.
class CtaBlock {
 public:
  __device__ CtaBlock(int block, int blocks) : block_(block), blocks_(blocks) {}
  __device__ static CtaBlock of_grid() { return {static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)}; }

  __device__ int rank() const { return static_cast<int>(threadIdx.x); }
  __device__ int size() const { return static_cast<int>(blockDim.x); }
  __device__ void sync() const { __syncthreads(); }
  __device__ int block() const { return block_; }
  __device__ int blocks() const { return blocks_; }
  __device__ int warp() const { return rank() / kWidth; }
  __device__ int warps() const { return size() / kWidth; }
  __device__ int lane() const { return rank() % kWidth; }
  __device__ int width() const { return kWidth; }
  __device__ void warp_sync() const { __syncwarp(); }
  __device__ uint32_t peers(int32_t key) const { return __match_any_sync(kAll, key); }
  __device__ uint32_t ballot(bool yes) const { return __ballot_sync(kAll, yes); }
  __device__ int64_t warp_sum(int64_t value) const {  // of halves whose sums fit: one instruction each
    constexpr int kBits = 26;
    const int64_t low = __reduce_add_sync(kAll, static_cast<unsigned>(value) & ((1u << kBits) - 1));
    const int64_t high = __reduce_add_sync(kAll, static_cast<unsigned>(value >> kBits));
    return (high << kBits) + low;
  }
  __device__ int32_t warp_max(int32_t value) const { return __reduce_max_sync(kAll, value); }
  __device__ int32_t warp_scan(int32_t value) const {
    int32_t sum = value;
    for (int step = 1; step < kWidth; step *= 2) {
      const int32_t lower = __shfl_up_sync(kAll, sum, step);
      if (lane() >= step) sum += lower;
    }
    return sum - value;
  }
  __device__ int32_t warp_get(int32_t value, int lane) const { return __shfl_sync(kAll, value, lane); }

 private:
  static constexpr int kWidth = 32;
  static constexpr unsigned kAll = 0xffffffffu;
  const int block_, blocks_;
};

}  // namespace flexep
