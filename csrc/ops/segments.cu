#include "ops/segments.cuh"

#include "ops/rows_launch.cuh"

namespace flexep {

void segment_map_cuda(const SegmentArgs& args, std::uintptr_t stream) {
  if (args.segments > kMostSegments) throw Error("segment_map takes at most 2048 segments on CUDA");
  if (args.rows == 0) return;
  const auto ctas =
      static_cast<unsigned>(std::min(ceil_div<std::int64_t>(args.rows, kRowThreads), 2 * multiprocessors()));
  const auto kernel = args.order ? segment_kernel<true> : segment_kernel<false>;
  kernel<<<ctas, kRowThreads, 0, stream_of(stream)>>>(args);
  cuda_check(cudaGetLastError(), "segment_map launch");
}

}  // namespace flexep
