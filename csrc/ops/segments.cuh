// Kernel of segment_map: every CTA adds up the sizes, then looks for the segment of each of its rows.
#pragma once
#include "base/math.h"
#include "ops/rows_vector.cuh"
#include "ops/segments.h"

namespace flexep {

__device__ __forceinline__ std::int64_t lifted(std::int32_t size, std::int64_t alignment) {
  return size <= 0 ? 0 : align_up(static_cast<std::int64_t>(size), alignment);
}

/// Turns values[0, count) of shared memory into the sums of what stands before each; `parts` has a place for each lane.
/// All lanes of the CTA call.
__device__ __forceinline__ void scan_exclusive(std::int64_t* values, int count, std::int64_t* parts) {
  const int lane = static_cast<int>(threadIdx.x), share = (count + kRowThreads - 1) / kRowThreads;
  const int begin = min(count, lane * share), end = min(count, begin + share);
  std::int64_t sum = 0;
  for (int i = begin; i < end; ++i) sum += values[i];
  parts[lane] = sum;
  __syncthreads();
  for (int reach = 1; reach < kRowThreads; reach *= 2) {
    const std::int64_t more = lane >= reach ? parts[lane - reach] : 0;
    __syncthreads();
    parts[lane] += more;
    __syncthreads();
  }
  std::int64_t before = parts[lane] - sum;
  for (int i = begin; i < end; ++i) {
    const std::int64_t value = values[i];
    values[i] = before;
    before += value;
  }
  __syncthreads();
}

template <bool kOrdered>
__global__ void __launch_bounds__(kRowThreads) segment_kernel(const SegmentArgs args) {
  __shared__ std::int64_t src_begin[kMostSegments], out_begin[kMostSegments], parts[kRowThreads];
  const int segments = static_cast<int>(args.segments);
  const auto at = [&](int s) { return kOrdered ? __ldg(args.order + s) : s; };
  const auto size_at = [&](int s) {
    const std::int32_t c = at(s);
    return c >= 0 && c < segments ? max(0, __ldg(args.sizes + c)) : 0;
  };
  for (int s = threadIdx.x; s < segments; s += kRowThreads) {
    src_begin[s] = lifted(__ldg(args.sizes + s), args.src_alignment);
    out_begin[s] = lifted(size_at(s), args.out_alignment);
  }
  __syncthreads();
  scan_exclusive(src_begin, segments, parts);
  scan_exclusive(out_begin, segments, parts);
  for (std::int64_t row = blockIdx.x * static_cast<std::int64_t>(kRowThreads) + threadIdx.x; row < args.rows;
       row += gridDim.x * static_cast<std::int64_t>(kRowThreads)) {
    int low = 0,
        high = segments;  // the last segment that begins at or before the row; empty ones before it do too
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (out_begin[middle] <= row)
        low = middle;
      else
        high = middle;
    }
    const std::int64_t offset = segments == 0 ? 0 : row - out_begin[low];
    args.map[row] =
        segments > 0 && offset < size_at(low) ? static_cast<std::int32_t>(src_begin[at(low)] + offset) : -1;
  }
}

}  // namespace flexep
