// Step 1 of the plan: what one rank publishes. Rows per place and distinct tokens per rank (and domain), never a T x E
// map.
#pragma once
#include <cstdint>

#include "plan/first_slot.h"
#include "plan/integers.h"
#include "plan/numbering.h"
#include "plan/table.h"

namespace flexep {

/// Phase 0: every block counts its tokens, and numbers its slots of each place for AssignRows. Phase 1: the blocks'
/// counts are added up, a range of keys a block.
struct CountSlots {
  static constexpr int kPhases = 2;
  static constexpr int kStamp = 4;
  static constexpr int kHeader = 1 + kStamp;

  Integers topk_idx;  // [tokens, top_k] expert ids, -1 empty; those outside [-1, experts) count as empty
  int tokens, top_k;
  TableView table;
  int domains;            // whose distinct tokens are counted as well; 0: none
  const float* weights;   // [tokens, top_k], of which no NaN is right; null: not looked at
  int32_t stamp[kStamp];  // what else this rank says

  int32_t*
      said;  // out [kHeader + experts + ranks + domains]: how many ids and weights are wrong; the stamp; slots per
             // place, a duplicate id counting again; distinct tokens with a slot on each rank, in each domain
  int32_t* number;  // out [tokens, top_k] number of the slot among its block's slots of that place; -1 empty
  int64_t* masked;  // what said[0] is added to, or null
  int32_t* workspace;  // workspace_ints(blocks); its first `experts` columns are for AssignRows

  FLEXEP_HD static int keys(int experts, int ranks, int domains) { return experts + ranks + domains + 1; }
  FLEXEP_HD int said_ints() const { return kHeader + table.experts + table.ranks + domains; }
  /// What is said, the numbers and the workspace lie in one memory, one behind the other.
  FLEXEP_HD void lie_in(int32_t* memory) {
    said = memory, number = said + said_ints(), workspace = number + items();
  }
  FLEXEP_HD int64_t items() const { return static_cast<int64_t>(tokens) * top_k; }
  FLEXEP_HD int64_t workspace_ints(int blocks) const { return static_cast<int64_t>(blocks) * keys(); }
  FLEXEP_HD int64_t shared_ints(int warps, int lanes) const {
    const int64_t count = KeyCounts::ints(table.experts, warps) + 2 * KeyCounts::ints(table.ranks, warps) +
                          2 * KeyCounts::ints(domains, warps) + warps;
    const int64_t sum = keys() + BlockCounts::scratch_ints(keys(), lanes);
    return count > sum ? count : sum;
  }

  template <int kPhase, class Team>
  FLEXEP_HD void phase(const Team& team, int32_t* shared) const {
    if constexpr (kPhase == 0)
      count_block(team, shared);
    else
      add_blocks(team, team.block(), team.blocks(), shared);
  }

  /// What phase 1 does of the `part`-th of `parts` ranges of keys, by one block; team.blocks(): how many had phase 0.
  template <class Team>
  FLEXEP_HD void add_blocks(const Team& team, int part, int parts, int32_t* shared) const {
    if (part == 0 && team.rank() == 0)
      for (int i = 0; i < kStamp; ++i) said[1 + i] = stamp[i];
    const auto [begin, end] = Share(keys(), part, parts);
    if (begin == end) return;
    int32_t *const total = shared, *const scratch = shared + keys();
    const BlockCounts blocks{workspace + begin, team.blocks(), keys(), end - begin};
    blocks.sum(team, team.blocks(), total, nullptr, scratch);
    FLEXEP_ROLLED
    for (int i = team.rank(); i < end - begin; i += team.size()) {
      if (begin + i + 1 < keys()) {
        said[kHeader + begin + i] = total[i];
        continue;
      }
      said[0] = total[i];
      if (masked) *masked += total[i];
    }
  }

 private:
  FLEXEP_HD int keys() const { return keys(table.experts, table.ranks, domains); }

  FLEXEP_HD int place(int64_t id) const {
    return id >= 0 && id < table.experts ? table.place_of_expert[id] : -1;
  }

  template <class Team>
  FLEXEP_HD void count_block(const Team& team, int32_t* shared) const {
    const int E = table.experts, R = table.ranks, warps = team.warps(), hop = domains > 0 ? R / domains : 1;
    const KeyCounts places{shared, E}, ranks{shared + KeyCounts::ints(E, warps), R};
    const KeyCounts over{ranks.counts + KeyCounts::ints(R, warps), domains};
    const KeyCounts wrong{over.counts + KeyCounts::ints(domains, warps), 1};
    const FirstSlots on_rank(team, wrong.counts + warps, R);
    const FirstSlots in_domain(team, wrong.counts + warps + KeyCounts::ints(R, warps), domains);
    places.clear(team);
    ranks.clear(team);
    over.clear(team);
    int32_t bad = 0;
    struct Read {
      int place = -1, rank = -1, bad = 0;
    };
    const auto read = [&](int64_t i, int, int) {
      const int64_t id = topk_idx[i];
      const int p = place(id), is_nan = weights && weights[i] != weights[i];
      return Read{p, p < 0 ? -1 : table.rank_of_place[p], is_nan + (p < 0 && id != -1)};
    };
    for_warp_slots(team, tokens, top_k, read, [&](const Read& slot, int64_t i, int t, int k, bool valid) {
      bad += slot.bad;
      const int32_t mine = places.add(team, slot.place, team.peers(slot.place));
      if (valid) number[i] = mine;
      count_first(team, on_rank, ranks, slot.rank, t, k);
      if (domains > 0) count_first(team, in_domain, over, slot.rank < 0 ? -1 : slot.rank / hop, t, k);
    });
    const auto all_bad = static_cast<int32_t>(team.warp_sum(bad));
    if (team.lane() == 0) wrong.counts[team.warp()] = all_bad;
    int32_t* const mine = workspace + static_cast<int64_t>(team.block()) * keys();
    places.finish(team, mine);
    ranks.finish(team, mine + E);
    over.finish(team, mine + E + R);
    wrong.finish(team, mine + E + R + domains);
    if (warps == 1) return;
    struct Numbered {
      int place = -1;
      int32_t number = -1;
    };
    const auto read_back = [&](int64_t i, int, int) { return Numbered{place(topk_idx[i]), number[i]}; };
    for_warp_slots(team, tokens, top_k, read_back, [&](const Numbered& slot, int64_t i, int, int, bool) {
      if (slot.place >= 0) number[i] = slot.number + places.below(team, slot.place);
    });
  }
};

}  // namespace flexep
