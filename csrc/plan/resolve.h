// Step 2 of the plan: from everybody's counts to the layout of every rank's expert-major rows.
//
// Kept-set rule (static capacity): for each rank, over its own places, the largest cut c for which
// sum over places of align_up(min(count, c)) <= capacity; each place keeps its first c rows in plan order.
// Every rank computes this from the same counts, so the kept set is the same everywhere before anything is
// sent.
#pragma once
#include <cstdint>

#include "base/math.h"
#include "base/team.h"
#include "plan/table.h"

namespace flexep {

struct ResolveRows {
  const int32_t* counts;  // [ranks, experts] source rank x place
  TableView table;
  int alignment;
  int64_t capacity;   // rows a rank, padding included; < 0: as many as arrive
  int32_t* base;      // out [ranks, experts] rows of the place that come from lower source ranks
  int32_t* start;     // out [experts] first row of the place on its rank
  int32_t* kept;      // out [experts] rows of the place after the rule
  int32_t* dropped;   // out [experts] rows of the place that the rule refused
  int32_t* cut;       // out [ranks] c; INT32_MAX without a capacity
  int64_t* num_rows;  // out [ranks] padded rows in use

  FLEXEP_HD int64_t padded_rows(int rank, const int32_t* totals, int64_t c) const {
    int64_t rows = 0;
    for (int p = table.rank_begin[rank]; p < table.rank_begin[rank + 1]; ++p)
      rows += align_up<int64_t>(totals[p] < c ? totals[p] : c, alignment);
    return rows;
  }

  FLEXEP_HD int32_t find_cut(int rank, const int32_t* totals) const {
    if (capacity < 0) return INT32_MAX;
    int64_t fits = 0, high = 0;  // padded_rows grows with c and cannot grow past the largest total
    for (int p = table.rank_begin[rank]; p < table.rank_begin[rank + 1]; ++p)
      high = totals[p] > high ? totals[p] : high;
    while (fits < high) {
      const int64_t c = fits + (high - fits + 1) / 2;
      if (padded_rows(rank, totals, c) <= capacity)
        fits = c;
      else
        high = c - 1;
    }
    return static_cast<int32_t>(fits);
  }

  template <class Team>
  FLEXEP_HD void operator()(const Team& team) const {
    const int E = table.experts, R = table.ranks;
    for (int p = team.rank(); p < E; p += team.size()) {
      int32_t total = 0;
      for (int s = 0; s < R; ++s) {
        base[static_cast<long long>(s) * E + p] = total;
        total += counts[static_cast<long long>(s) * E + p];
      }
      kept[p] = total;  // for now the total; cut below
    }
    team.sync();
    for (int r = team.rank(); r < R; r += team.size()) {
      cut[r] = find_cut(r, kept);
      int64_t row = 0;
      for (int p = table.rank_begin[r]; p < table.rank_begin[r + 1]; ++p) {
        const int32_t total = kept[p];
        kept[p] = total < cut[r] ? total : cut[r];
        dropped[p] = total - kept[p];
        start[p] = static_cast<int32_t>(row);
        row += align_up<int64_t>(kept[p], alignment);
      }
      num_rows[r] = row;
    }
  }
};

}  // namespace flexep
