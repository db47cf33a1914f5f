// Index maps between two layouts of the same segments of rows: padding, its removal, sorting, the transpose of chunks.
#pragma once
#include <cstdint>

#include "plan/integers.h"
#include "plan/layout.h"

namespace flexep {

/// Segment s of the output is segment order[s] of the source; in either, each segment's rows are padded to an
/// alignment. Sizes below 0 count as 0, an order entry outside [0, segments) as an empty segment.
struct MapSegments {
  static constexpr int kPhases = 1;

  Integers sizes;  // [segments] rows of each source segment
  Integers order;  // [segments]; null: as in the source
  int segments, src_alignment, out_alignment;
  int64_t src_rows;    // rows that exist: no entry of the map reaches past them
  int num_rows;        // rows of the output
  int32_t* map;        // out [num_rows] source row of each output row; -1 padding, and past the last segment
  int32_t* workspace;  // workspace_ints(blocks)

  FLEXEP_HD int64_t items() const { return num_rows; }
  FLEXEP_HD int64_t workspace_ints(int) const { return 0; }
  FLEXEP_HD int64_t shared_ints(int, int) const { return 3 * static_cast<int64_t>(segments) + 2; }

  template <int kPhase, class Team>
  FLEXEP_HD void phase(const Team& team, int32_t* shared) const {
    int32_t* const size = shared;                         // [segments] of the source
    int32_t* const src_begin = shared + segments;         // [segments + 1]
    int32_t* const out_begin = src_begin + segments + 1;  // [segments + 1]
    for (int s = team.rank(); s < segments; s += team.size()) {
      const int64_t rows = sizes[s];
      size[s] = static_cast<int32_t>(rows < 0 ? 0 : rows > INT32_MAX ? INT32_MAX : rows);
    }
    team.sync();
    if (team.warp() == 0) {
      begin_segments(team, src_begin, src_alignment, [&](int s) { return size[s]; });
      begin_segments(team, out_begin, out_alignment, [&](int s) {
        const int from = source_of(s);
        return from < 0 ? 0 : size[from];
      });
    }
    team.sync();
    const WarpRange mine(team, num_rows);
    int s = segment_at(out_begin, mine.begin);
    for (int at = mine.begin; at < mine.end; ++s) {
      const int end = s < segments && out_begin[s + 1] < mine.end ? out_begin[s + 1] : mine.end;
      const int from = s < segments ? source_of(s) : -1;
      for (int row = at + team.lane(); row < end; row += team.width()) {
        const int64_t source = from < 0 ? -1 : static_cast<int64_t>(src_begin[from]) + row - out_begin[s];
        map[row] = from >= 0 && row - out_begin[s] < size[from] && source < src_rows
                       ? static_cast<int32_t>(source)
                       : -1;
      }
      at = end;
    }
  }

 private:
  FLEXEP_HD int source_of(int s) const {
    if (!order.values) return s;
    const int64_t from = order[s];
    return from >= 0 && from < segments ? static_cast<int>(from) : -1;
  }

  /// begin [segments + 1]: where each segment begins and the last one ends. The lanes of one warp call together.
  template <class Team, class SizeOf>
  FLEXEP_HD void begin_segments(const Team& team, int32_t* begin, int alignment, SizeOf size_of) const {
    const LaneRange mine(WarpLanes<Team>{team}, segments);
    int64_t rows = 0;
    for (int s = mine.begin; s < mine.end; ++s) rows += PlaceLayout::padded(size_of(s), alignment);
    const int64_t total = team.warp_sum(rows);
    rows = team.warp_scan(rows);
    for (int s = mine.begin; s < mine.end; ++s) {
      begin[s] = narrow(rows);
      rows += PlaceLayout::padded(size_of(s), alignment);
    }
    if (team.lane() == 0) begin[segments] = narrow(total);
  }

  static FLEXEP_HD int32_t narrow(int64_t rows) {
    return static_cast<int32_t>(rows < INT32_MAX ? rows : INT32_MAX);
  }

  /// The last segment that begins at or before `row`; `segments` past the end of the last.
  FLEXEP_HD int segment_at(const int32_t* begin, int row) const {
    int low = 0, high = segments;
    while (low < high) {
      const int middle = low + (high - low + 1) / 2;
      if (begin[middle] <= row)
        low = middle;
      else
        high = middle - 1;
    }
    return low;
  }
};

/// Chunks [outer, inner] of equally many rows to [inner, outer].
struct MapTransposed {
  static constexpr int kPhases = 1;

  int num_rows, outer, inner;  // num_rows: a multiple of outer * inner
  int32_t* map;                // out [num_rows] source row of each output row

  FLEXEP_HD int64_t items() const { return num_rows; }
  FLEXEP_HD int64_t shared_ints(int, int) const { return 0; }

  template <int kPhase, class Team>
  FLEXEP_HD void phase(const Team& team, int32_t*) const {
    const uint32_t chunk = static_cast<uint32_t>(num_rows / outer / inner);
    for (int64_t row = grid_rank(team); row < num_rows; row += grid_size(team)) {
      const uint32_t to = static_cast<uint32_t>(row) / chunk, in_chunk = static_cast<uint32_t>(row) % chunk;
      const uint32_t i = to / outer, o = to % outer;
      map[row] = static_cast<int32_t>((o * inner + i) * chunk + in_chunk);
    }
  }
};

}  // namespace flexep
