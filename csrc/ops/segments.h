// Index maps between two layouts of the same segments of rows: padding, its removal and sorted chunks are gathers by
// them.
#pragma once
#include <cstdint>

namespace flexep {

/// At most so many segments.
constexpr std::int64_t kMostSegments = 2048;

/// Row of the source of each output row, -1 where the output is padding and past its last segment. Segment c has
/// sizes[c] rows. Source: the segments in order, each lifted to a multiple of src_alignment. Output: the segments
/// order[0], order[1], ... (null: in order), each lifted to a multiple of out_alignment. An entry of `order` outside
/// [0, segments) is an empty segment; sizes that are wrong give a wrong map, nothing worse.
struct SegmentArgs {
  std::int32_t* map;          // [rows]
  const std::int32_t* sizes;  // [segments]
  const std::int32_t* order;  // [segments] or null
  std::int64_t rows, segments, out_alignment, src_alignment;
};

/// Enqueued on a stream; throws NotBuilt in a build without nvcc. On the CPU python/flexep/ops/segments.py does it.
void segment_map_cuda(const SegmentArgs& args, std::uintptr_t stream);

}  // namespace flexep
