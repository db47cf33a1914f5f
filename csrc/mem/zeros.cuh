// Shared memory of a CTA that is zero, out of which the copy engine of the SM clears rows.
#pragma once
#include <cstdint>

#include "mem/cuda.cuh"

namespace flexep {

struct Zeros {
  static constexpr int kBytes = 7168;

  alignas(128) char bytes[kBytes];

  /// By all threads, which meet before anybody stores them.
  __device__ void clear() {
    constexpr int kVectors = kBytes / static_cast<int>(sizeof(uint4));
    for (int i = static_cast<int>(threadIdx.x); i < kVectors; i += static_cast<int>(blockDim.x))
      reinterpret_cast<uint4*>(bytes)[i] = {0, 0, 0, 0};
    ptx::fence_proxy_async_shared_cta();
  }
  /// Clears a row, by one thread; the next may be sent while this one is on its way. `row_bytes`: a multiple of 16.
  __device__ void store(char* row, std::int64_t row_bytes) const {
    for (std::int64_t at = 0; at < row_bytes; at += kBytes)
      ptx::bulk_store(row + at, bytes,
                      static_cast<int>(min(row_bytes - at, static_cast<std::int64_t>(kBytes))));
    ptx::bulk_commit_group();
    ptx::bulk_wait_group_read<1>();
  }
  /// What this thread has sent is in place.
  __device__ static void drain() { ptx::bulk_wait_group<0>(); }
};

}  // namespace flexep
