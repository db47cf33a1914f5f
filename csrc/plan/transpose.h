// The row map of drop-and-pad: chunks of equally many rows, rank-major to expert-major and back.
#pragma once
#include <cstdint>

#include "plan/block.h"

namespace flexep {

/// Chunks [outer, inner] of equally many rows to [inner, outer].
struct TransposeChunks {
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
