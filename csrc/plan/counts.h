// Step 1 of the plan: what one rank publishes. Rows per place and distinct tokens per rank, never a T x E
// map.
#pragma once
#include <cstdint>

#include "plan/first_slot.h"
#include "plan/numbering.h"
#include "plan/table.h"

namespace flexep {

/// Phase 0: every block counts its tokens. Phase 1: the blocks' counts are added up, a range of keys a block.
struct CountSlots {
  static constexpr int kPhases = 2;

  const int32_t* topk_idx;  // [tokens, top_k] expert ids, -1 empty
  int tokens, top_k;
  TableView table;
  int32_t* counts;       // out [experts] slots of this rank's tokens per place; a duplicate id counts again
  int32_t* rank_tokens;  // out [ranks] distinct tokens with at least one slot on the rank
  int32_t* workspace;    // workspace_ints(blocks)

  FLEXEP_HD int64_t items() const { return static_cast<int64_t>(tokens) * top_k; }
  FLEXEP_HD int64_t workspace_ints(int blocks) const { return static_cast<int64_t>(blocks) * keys(); }
  FLEXEP_HD int64_t shared_ints(int warps, int lanes) const {
    const int64_t count = KeyCounts::ints(table.experts, warps) + 2 * KeyCounts::ints(table.ranks, warps);
    const int64_t sum = keys() + BlockCounts::scratch_ints(keys(), lanes);
    return count > sum ? count : sum;
  }

  template <int kPhase, class Team>
  FLEXEP_HD void phase(const Team& team, int32_t* shared) const {
    if constexpr (kPhase == 0)
      count_block(team, shared);
    else
      add_blocks(team, shared);
  }

 private:
  FLEXEP_HD int keys() const { return table.experts + table.ranks; }

  template <class Team>
  FLEXEP_HD void count_block(const Team& team, int32_t* shared) const {
    const KeyCounts places{shared, table.experts};
    const KeyCounts ranks{shared + KeyCounts::ints(table.experts, team.warps()), table.ranks};
    const FirstSlots first(team, ranks.counts + KeyCounts::ints(table.ranks, team.warps()), table.ranks);
    places.clear(team);
    ranks.clear(team);
    for_warp_slots(team, tokens, top_k, [&](int64_t i, int t, int k, bool valid) {
      const int p = valid ? table.place(topk_idx[i]) : -1;
      places.add(team, p, team.peers(p));
      const int r = p < 0 ? -1 : table.rank_of_place[p];
      const uint32_t same = team.peers(r);
      const bool is_first = first.is_first(team, r, t, k, same);
      ranks.add(team, is_first ? r : -1, same & team.ballot(is_first));
    });
    int32_t* const mine = workspace + static_cast<int64_t>(team.block()) * keys();
    places.finish(team, mine);
    ranks.finish(team, mine + table.experts);
  }

  template <class Team>
  FLEXEP_HD void add_blocks(const Team& team, int32_t* shared) const {
    const int begin = static_cast<int>(static_cast<int64_t>(keys()) * team.block() / team.blocks());
    const int end = static_cast<int>(static_cast<int64_t>(keys()) * (team.block() + 1) / team.blocks());
    if (begin == end) return;
    int32_t *const total = shared, *const scratch = shared + keys();
    const BlockCounts blocks{workspace + begin, team.blocks(), keys(), end - begin};
    blocks.sum(team, team.blocks(), total, nullptr, scratch);
    for (int i = team.rank(); i < end - begin; i += team.size()) {
      const int key = begin + i;
      (key < table.experts ? counts + key : rank_tokens + (key - table.experts))[0] = total[i];
    }
  }
};

}  // namespace flexep
