// Where the rows of one rank's places begin, by the kept-set rule.
//
// Kept-set rule (static capacity): the largest cut c for which the sum over the rank's places of
// align_up(min(count, c)) is at most the capacity; each place keeps its first c rows in plan order. Every rank computes
// this from the same counts, so the kept set is the same everywhere before anything is sent.
#pragma once
#include <cstdint>

#include "plan/block.h"

namespace flexep {

struct PlaceLayout {
  int32_t* start;    // out [places] first row
  int32_t* kept;     // in [places] all rows; out those that the rule keeps
  int32_t* dropped;  // out [places] the others
  int places, alignment;
  int64_t capacity;  // rows, padding included; < 0: as many as there are

  struct Result {
    int32_t cut;   // INT32_MAX without a capacity
    int64_t rows;  // in use, padding included
  };

  /// The lanes of one warp call together.
  template <class Team>
  FLEXEP_HD Result operator()(const Team& team) const {
    const LaneRange mine(WarpLanes<Team>{team}, places);
    const int32_t cut = find_cut(team, mine);
    const int64_t held = padded_rows(mine, cut);
    int64_t row = team.warp_scan(held);
    const int64_t rows = team.warp_sum(held);
    for (int p = mine.begin; p < mine.end; ++p) {
      const int32_t count = kept[p], keep = count < cut ? count : cut;
      kept[p] = keep;
      dropped[p] = count - keep;
      start[p] = static_cast<int32_t>(row);
      row += padded(keep, alignment);
    }
    return {cut, rows};
  }

  /// align_up, without a division for powers of two, and by a 32-bit one for others: a GPU has neither.
  static FLEXEP_HD int64_t padded(int32_t count, int alignment) {
    const uint32_t unit = static_cast<uint32_t>(alignment), up = static_cast<uint32_t>(count) + (unit - 1);
    if ((unit & (unit - 1)) == 0) return up & ~(unit - 1);
    return static_cast<int64_t>(up / unit) * unit;
  }

 private:
  FLEXEP_HD int64_t padded_rows(const LaneRange& mine, int64_t c) const {
    int64_t rows = 0;
    for (int p = mine.begin; p < mine.end; ++p)
      rows += padded(kept[p] < c ? kept[p] : static_cast<int32_t>(c), alignment);
    return rows;
  }

  template <class Team>
  FLEXEP_HD int32_t find_cut(const Team& team, const LaneRange& mine) const {
    if (capacity < 0) return INT32_MAX;
    int64_t high = 0;
    for (int p = mine.begin; p < mine.end; ++p) high = kept[p] > high ? kept[p] : high;
    high = team.warp_max(high);
    if (team.warp_sum(padded_rows(mine, high)) <= capacity) return static_cast<int32_t>(high);
    // Between two multiples of the alignment the padded rows do not change, so the largest cut is a multiple.
    int64_t fits = 0, above = static_cast<int32_t>(high) / alignment;
    while (fits < above) {
      const int64_t m = fits + (above - fits + 1) / 2;
      if (team.warp_sum(padded_rows(mine, m * alignment)) <= capacity)
        fits = m;
      else
        above = m - 1;
    }
    return static_cast<int32_t>(fits * alignment);
  }
};

}  // namespace flexep
