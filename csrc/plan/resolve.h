// Step 2 of the plan: from everybody's counts to the layout of every rank's expert-major rows (plan/layout.h).
#pragma once
#include <cstdint>

#include "plan/layout.h"
#include "plan/table.h"

namespace flexep {

/// The ranks' layouts do not depend on each other: a block takes one rank after the other.
struct ResolveRows {
  static constexpr int kPhases = 1;

  const int32_t* counts;  // [ranks, experts] source rank x place, rows `stride` apart
  int64_t stride;
  TableView table;
  int alignment;
  int64_t capacity;   // rows a rank, padding included; < 0: as many as arrive
  int32_t* base;      // out [ranks, experts] rows of the place that come from lower source ranks
  int32_t* start;     // out [experts] first row of the place on its rank
  int32_t* kept;      // out [experts] rows of the place after the rule
  int32_t* padded;    // out [experts] the same, padded
  int32_t* dropped;   // out [experts] rows of the place that the rule refused
  int32_t* cut;       // out [ranks] c; INT32_MAX without a capacity
  int64_t* num_rows;  // out [ranks] padded rows in use

  FLEXEP_HD int64_t shared_ints(int, int) const { return 0; }

  template <int kPhase, class Team>
  FLEXEP_HD void phase(const Team& team, int32_t*) const {
    const bool alone = team.blocks() * team.size() == 1;
    if (alone) scan_all();
    for (int r = team.block(); r < table.ranks; r += team.blocks()) {
      const int begin = table.rank_begin[r], end = table.rank_begin[r + 1];
      if (!alone)
        for (int p = begin + team.rank(); p < end; p += team.size()) kept[p] = scan_sources(p);
      team.sync();
      if (team.warp() != 0) continue;
      const PlaceLayout layout{start + begin, kept + begin, dropped + begin,
                               end - begin,   alignment,    capacity};
      const PlaceLayout::Result result = layout(team);
      if (team.lane() == 0) cut[r] = result.cut, num_rows[r] = result.rows;
      const LaneRange mine(WarpLanes<Team>{team}, end - begin);  // the lane that has written `kept`
      for (int p = begin + mine.begin; p < begin + mine.end; ++p)
        padded[p] = static_cast<int32_t>(PlaceLayout::padded(kept[p], alignment));
    }
  }

 private:
  /// The place's rows before each source, and their sum.
  FLEXEP_HD int32_t scan_sources(int p) const {
    constexpr int kBatch = 8;  // loads in flight
    int32_t total = 0;
    for (int first = 0; first < table.ranks; first += kBatch) {
      int32_t n[kBatch];
      FLEXEP_UNROLL
      for (int j = 0; j < kBatch; ++j) n[j] = first + j < table.ranks ? counts[(first + j) * stride + p] : 0;
      FLEXEP_UNROLL
      for (int j = 0; j < kBatch; ++j) {
        if (first + j < table.ranks) base[at(first + j, p)] = total;
        total += n[j];
      }
    }
    return total;
  }

  /// The same for all places along the rows, as memory lies: down a column every load of one thread would miss its
  /// cache.
  FLEXEP_HD void scan_all() const {
    for (int p = 0; p < table.experts; ++p) kept[p] = 0;
    for (int source = 0; source < table.ranks; ++source)
      for (int p = 0; p < table.experts; ++p) {
        base[at(source, p)] = kept[p];
        kept[p] += counts[source * stride + p];
      }
  }

  FLEXEP_HD int64_t at(int source, int p) const { return static_cast<int64_t>(source) * table.experts + p; }
};

}  // namespace flexep
