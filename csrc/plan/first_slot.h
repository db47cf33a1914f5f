// Which slot of a token is its first on a rank: a token crosses to a rank once, however many of its experts live there.
#pragma once
#include <cstdint>

#include "plan/numbering.h"

namespace flexep {

/// For each warp the last token seen of each rank: it carries a token over from one batch of lanes to the next.
class FirstSlots {
 public:
  /// `last_token`: shared [warps, ranks].
  template <class Team>
  FLEXEP_HD FirstSlots(const Team& team, int32_t* last_token, int ranks)
      : last_token_(last_token + KeyCounts::ints(ranks, team.warp())) {
    FLEXEP_ROLLED
    for (int r = team.lane(); r < ranks; r += team.width()) last_token_[r] = -1;
    team.warp_sync();
  }

  /// Whether slot k of token t is the token's first on rank r (false for r < 0), the lanes holding consecutive slots.
  /// `same`: the lanes whose slot is on this lane's rank. All lanes call together.
  template <class Team>
  FLEXEP_HD bool is_first(const Team& team, int r, int t, int k, uint32_t same) const {
    const int lane = team.lane();
    const uint32_t of_token =
        lanes_below(lane) & ~lanes_below(lane > k ? lane - k : 0);  // its earlier slots here
    const bool first = r >= 0 && !(same & of_token) && last_token_[r] != t;
    team.warp_sync();
    // The last of the lanes has the highest token, the only one of which the next batch may hold more.
    if (r >= 0 && same >> lane == 1) last_token_[r] = t;
    team.warp_sync();
    return first;
  }

 private:
  int32_t* last_token_;
};

/// Counts the slot of each lane, which is on `key` (-1: nowhere), if it is its token's first there.
template <class Team>
FLEXEP_HD void count_first(const Team& team, const FirstSlots& first, const KeyCounts& counts, int key, int t,
                           int k) {
  const uint32_t same = team.peers(key);
  const bool is_first = first.is_first(team, key, t, k, same);
  counts.add(team, is_first ? key : -1, same & team.ballot(is_first));
}

}  // namespace flexep
