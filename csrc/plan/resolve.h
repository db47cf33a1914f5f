// Step 2 of the plan: from everybody's counts to the layout of every rank's expert-major rows (plan/layout.h).
#pragma once
#include <cstdint>

#include "plan/layout.h"
#include "plan/table.h"

namespace flexep {

/// The ranks' layouts do not depend on each other: a block takes some ranks, a warp one after the other.
struct ResolveRows {
  static constexpr int kPhases = 1;

  const int32_t* counts;  // [ranks, experts] source rank x place, rows `stride` apart
  int64_t stride;
  TableView table;
  int alignment;
  int64_t capacity;  // rows a rank, padding included; < 0: as many as arrive
  int source;        // the only one whose `base` is asked for; < 0: everybody's is
  int32_t* base;    // out [ranks, experts], or [experts]: rows of the place that come from lower source ranks
  int32_t* start;   // out [experts] first row of the place on its rank
  int32_t* kept;    // out [experts] rows of the place after the rule
  int32_t* padded;  // out [experts] the same, padded; or null
  int32_t* dropped;   // out [experts] rows of the place that the rule refused
  int32_t* cut;       // out [ranks] c; INT32_MAX without a capacity
  int64_t* num_rows;  // out [ranks] padded rows in use; or null

  FLEXEP_HD int64_t shared_ints(int, int) const { return 0; }

  template <int kPhase, class Team>
  FLEXEP_HD void phase(const Team& team, int32_t*) const {
    lay_out(team, team.block(), team.blocks());
  }

  /// The `part`-th of `parts` ranges of ranks, by one block.
  template <class Team>
  FLEXEP_HD void lay_out(const Team& team, int part, int parts) const {
    const LaneRange ranks(Lane{part, parts}, table.ranks);
    if (parts * team.size() == 1) {
      scan_all();
    } else {
      FLEXEP_ROLLED
      for (int p = table.rank_begin[ranks.begin] + team.rank(); p < table.rank_begin[ranks.end];
           p += team.size())
        kept[p] = scan_sources(p);
    }
    team.sync();
    FLEXEP_ROLLED
    for (int r = ranks.begin + team.warp(); r < ranks.end; r += team.warps()) lay_out_rank(team, r);
  }

 private:
  template <class Team>
  FLEXEP_HD void lay_out_rank(const Team& team, int r) const {
    const int begin = table.rank_begin[r], end = table.rank_begin[r + 1];
    const PlaceLayout layout{start + begin, kept + begin, dropped + begin, end - begin, alignment, capacity};
    const PlaceLayout::Result result = layout(team);
    if (team.lane() == 0) cut[r] = result.cut;
    if (team.lane() == 0 && num_rows) num_rows[r] = result.rows;
    if (!padded) return;
    const LaneRange mine(WarpLanes<Team>{team}, end - begin);  // the lane that has written `kept`
    FLEXEP_ROLLED
    for (int p = begin + mine.begin; p < begin + mine.end; ++p)
      padded[p] = static_cast<int32_t>(PlaceLayout::padded(kept[p], alignment));
  }

  /// The place's rows before each source, and their sum.
  FLEXEP_HD int32_t scan_sources(int p) const {
    constexpr int kBatch = 8;  // loads in flight
    int32_t total = 0;
    FLEXEP_ROLLED
    for (int first = 0; first < table.ranks; first += kBatch) {
      int32_t n[kBatch];
      FLEXEP_UNROLL
      for (int j = 0; j < kBatch; ++j) n[j] = first + j < table.ranks ? counts[(first + j) * stride + p] : 0;
      FLEXEP_UNROLL
      for (int j = 0; j < kBatch; ++j) {
        if (first + j < table.ranks) put_base(first + j, p, total);
        total += n[j];
      }
    }
    return total;
  }

  /// The same for all places along the rows, as memory lies: down a column every load of one thread would miss its
  /// cache.
  FLEXEP_HD void scan_all() const {
    for (int p = 0; p < table.experts; ++p) kept[p] = 0;
    for (int from = 0; from < table.ranks; ++from)
      for (int p = 0; p < table.experts; ++p) {
        put_base(from, p, kept[p]);
        kept[p] += counts[from * stride + p];
      }
  }

  FLEXEP_HD void put_base(int from, int p, int32_t rows) const {
    if (source < 0)
      base[static_cast<int64_t>(from) * table.experts + p] = rows;
    else if (from == source)
      base[p] = rows;
  }
};

}  // namespace flexep
