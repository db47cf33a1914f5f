// Step 1 of the plan: what one rank publishes. Rows per place and distinct tokens per rank, never a T x E
// map.
#pragma once
#include <cstdint>

#include "base/team.h"
#include "plan/table.h"

namespace flexep {

struct CountSlots {
  const int32_t* topk_idx;  // [tokens, top_k] expert ids, -1 empty
  int tokens, top_k;
  TableView table;
  int32_t* counts;       // out [experts] slots of this rank's tokens per place; a duplicate id counts again
  int32_t* rank_tokens;  // out [ranks] distinct tokens with at least one slot on the rank
  int32_t* workspace;    // workspace_ints(lanes)

  static FLEXEP_HD long long workspace_ints(int experts, int ranks, int lanes) {
    return static_cast<long long>(lanes) * (experts + 2 * ranks);
  }

  template <class Team>
  FLEXEP_HD void operator()(const Team& team) const {
    const int E = table.experts, R = table.ranks, lanes = team.size();
    int32_t* lane_counts = workspace + static_cast<long long>(team.rank()) * E;
    int32_t* lane_tokens =
        workspace + static_cast<long long>(lanes) * E + static_cast<long long>(team.rank()) * 2 * R;
    int32_t* last_token = lane_tokens + R;  // the last token counted for each rank: counts a token once
    for (int p = 0; p < E; ++p) lane_counts[p] = 0;
    for (int r = 0; r < R; ++r) lane_tokens[r] = 0, last_token[r] = -1;

    const LaneRange mine(team, tokens);
    for (int t = mine.begin; t < mine.end; ++t) {
      for (int k = 0; k < top_k; ++k) {
        const int p = table.place(topk_idx[static_cast<long long>(t) * top_k + k]);
        if (p < 0) continue;
        ++lane_counts[p];
        const int r = table.rank_of_place[p];
        if (last_token[r] != t) last_token[r] = t, ++lane_tokens[r];
      }
    }
    team.sync();
    for (int p = team.rank(); p < E; p += lanes) {
      int32_t sum = 0;
      for (int l = 0; l < lanes; ++l) sum += workspace[static_cast<long long>(l) * E + p];
      counts[p] = sum;
    }
    for (int r = team.rank(); r < R; r += lanes) {
      int32_t sum = 0;
      const int32_t* first = workspace + static_cast<long long>(lanes) * E;
      for (int l = 0; l < lanes; ++l) sum += first[static_cast<long long>(l) * 2 * R + r];
      rank_tokens[r] = sum;
    }
  }
};

}  // namespace flexep
