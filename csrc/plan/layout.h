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
    int32_t cut = INT32_MAX;
    int64_t held = padded_rows(mine, cut), rows = team.warp_sum(held);
    if (capacity >= 0) {
      cut = team.warp_max(highest(mine));
      if (rows > capacity) {
        cut = largest_cut(team, mine, cut);
        held = padded_rows(mine, cut), rows = team.warp_sum(held);
      }
    }
    int32_t row = team.warp_scan(static_cast<int32_t>(held));
    FLEXEP_ROLLED
    for (int p = mine.begin; p < mine.end; ++p) {
      const int32_t count = kept[p], keep = count < cut ? count : cut;
      kept[p] = keep;
      dropped[p] = count - keep;
      start[p] = row;
      row += static_cast<int32_t>(padded(keep, alignment));
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
  FLEXEP_HD int64_t padded_rows(const LaneRange& mine, int32_t cut) const {
    int64_t rows = 0;
    FLEXEP_ROLLED
    for (int p = mine.begin; p < mine.end; ++p) rows += padded(kept[p] < cut ? kept[p] : cut, alignment);
    return rows;
  }

  FLEXEP_HD int32_t highest(const LaneRange& mine) const {
    int32_t high = 0;
    FLEXEP_ROLLED
    for (int p = mine.begin; p < mine.end; ++p) high = kept[p] > high ? kept[p] : high;
    return high;
  }

  /// That fits, below the highest count, which does not.
  template <class Team>
  FLEXEP_HD int32_t largest_cut(const Team& team, const LaneRange& mine, int32_t high) const {
    // Between two multiples of the alignment the padded rows do not change, so the largest cut is a multiple.
    int32_t fits = 0, above = high / alignment;
    while (fits < above) {
      const int32_t m = fits + (above - fits + 1) / 2;
      if (team.warp_sum(padded_rows(mine, m * alignment)) <= capacity)
        fits = m;
      else
        above = m - 1;
    }
    return fits * alignment;
  }
};

}  // namespace flexep
