// Step 3 of the plan: the row of every slot, and the order in which one source rank's tokens leave.
//
// Order is fixed: inside a place by (source rank, token, slot); to a rank by token. Warps own contiguous token ranges
// and learn where their range begins from sums of counts, so no atomic decides an order and any number of lanes, warps
// and blocks writes the same integers.
#pragma once
#include <cstdint>

#include "plan/first_slot.h"
#include "plan/numbering.h"
#include "plan/table.h"

namespace flexep {

/// Phase 0 numbers the slots of each place inside a block, phase 1 gives them rows and numbers the tokens that leave for
/// each rank inside a block, phase 2 gives those their positions.
struct AssignRows {
  static constexpr int kPhases = 3;

  const int32_t* topk_idx;  // [tokens, top_k]
  int tokens, top_k;
  TableView table;
  const int32_t* base;   // [experts] this source's row of ResolveRows::base
  const int32_t* start;  // [experts]
  const int32_t* cut;    // [ranks]
  int split;             // positions a destination owns in the send buffer; < 0: dense
  int num_send;          // length of send_token

  int32_t* slot_row;     // out [tokens, top_k] row on the destination rank; -1 empty or dropped
  int32_t* slot_rank;    // out [tokens, top_k] destination rank; -1 likewise
  int32_t* slot_send;    // out [tokens, top_k] position in the send buffer that carries the slot; -1 likewise
  int32_t* send_row;     // out [tokens, top_k] send positions of the token, ranks ascending, then -1
  int32_t* send_rank;    // out [tokens, top_k] their ranks, then -1
  int32_t* send_token;   // out [num_send] token at each send position; -1 unused
  int32_t* send_counts;  // out [ranks] tokens that leave for each rank
  int32_t* workspace;    // workspace_ints(blocks)

  FLEXEP_HD int64_t items() const { return static_cast<int64_t>(tokens) * top_k; }
  FLEXEP_HD int64_t workspace_ints(int blocks) const {
    return static_cast<int64_t>(blocks) * (table.experts + table.ranks);
  }
  FLEXEP_HD int64_t shared_ints(int warps, int lanes) const {
    const int64_t E = table.experts, R = table.ranks;
    const int64_t numbers = KeyCounts::ints(table.experts, warps);
    const int64_t rows = E + BlockCounts::scratch_ints(table.experts, lanes);
    const int64_t leaving = E + 2 * KeyCounts::ints(table.ranks, warps);
    const int64_t positions = 2 * R + BlockCounts::scratch_ints(table.ranks, lanes);
    const int64_t most = numbers > rows ? numbers : rows, more = leaving > positions ? leaving : positions;
    return most > more ? most : more;
  }

  template <int kPhase, class Team>
  FLEXEP_HD void phase(const Team& team, int32_t* shared) const {
    if constexpr (kPhase == 0)
      number_slots(team, shared);
    else if constexpr (kPhase == 1)
      place_slots(team, shared);
    else
      place_tokens(team, shared);
  }

 private:
  FLEXEP_HD int32_t* place_counts() const { return workspace; }  // [blocks, experts]
  FLEXEP_HD int32_t* rank_counts(int blocks) const {             // [blocks, ranks]
    return workspace + static_cast<int64_t>(blocks) * table.experts;
  }

  template <class Team>
  FLEXEP_HD void number_slots(const Team& team, int32_t* shared) const {
    const KeyCounts places{shared, table.experts};
    places.clear(team);
    for_warp_slots(team, tokens, top_k, [&](int64_t i, int, int, bool valid) {
      const int p = valid ? table.place(topk_idx[i]) : -1;
      const int32_t number = places.add(team, p, team.peers(p));
      if (valid) slot_row[i] = number;
    });
    places.finish(team, place_counts() + static_cast<int64_t>(team.block()) * table.experts);
    if (team.warps() == 1) return;
    for_warp_slots(team, tokens, top_k, [&](int64_t i, int, int, bool valid) {
      const int p = valid ? table.place(topk_idx[i]) : -1;
      if (p >= 0) slot_row[i] += places.below(team, p);
    });
  }

  template <class Team>
  FLEXEP_HD void place_slots(const Team& team, int32_t* shared) const {
    const int E = table.experts, R = table.ranks;
    int32_t* const first = shared;  // [experts] number of the block's first slot among those of the place
    int32_t* const rest = shared + E;
    const BlockCounts blocks{place_counts(), team.blocks(), E, E};
    blocks.sum(team, team.block(), first, nullptr, rest);
    for (int p = team.rank(); p < E; p += team.size()) first[p] += base[p];
    team.sync();

    const KeyCounts leaving{rest, R};
    const FirstSlots first_slots(team, rest + KeyCounts::ints(R, team.warps()), R);
    leaving.clear(team);
    for_warp_slots(team, tokens, top_k, [&](int64_t i, int t, int k, bool valid) {
      const int p = valid ? table.place(topk_idx[i]) : -1;
      int r = p < 0 ? -1 : table.rank_of_place[p];
      const int32_t number = p < 0 ? 0 : first[p] + slot_row[i];
      if (r >= 0 && number >= cut[r]) r = -1;
      const uint32_t same = team.peers(r);
      const bool leaves = first_slots.is_first(team, r, t, k, same);
      const int32_t order = leaving.add(team, leaves ? r : -1, same & team.ballot(leaves));
      if (!valid) return;
      slot_row[i] = r < 0 ? -1 : start[p] + number;
      slot_rank[i] = r;
      slot_send[i] = order;
      send_row[i] = send_rank[i] = -1;  // phase 2 writes over them
    });
    leaving.finish(team, rank_counts(team.blocks()) + static_cast<int64_t>(team.block()) * R);
    if (team.warps() == 1) return;
    for_warp_slots(team, tokens, top_k, [&](int64_t i, int, int, bool valid) {
      if (valid && slot_send[i] >= 0) slot_send[i] += leaving.below(team, slot_rank[i]);
    });
  }

  template <class Team>
  FLEXEP_HD void place_tokens(const Team& team, int32_t* shared) const {
    const int R = table.ranks;
    int32_t *const first = shared, *const total = shared + R;  // [ranks] each
    const BlockCounts blocks{rank_counts(team.blocks()), team.blocks(), R, R};
    blocks.sum(team, team.block(), first, total, shared + 2 * R);
    if (team.warp() == 0) begin_ranks(team, first, total);
    team.sync();
    clear_unused(team, total);
    list_ranks(team, first);
    team.warp_sync();
    for_warp_slots(team, tokens, top_k, [&](int64_t i, int, int k, bool valid) {
      const int r = valid ? slot_rank[i] : -1;
      if (r < 0) return;
      int64_t at = i - k;
      while (send_rank[at] != r) ++at;
      slot_send[i] = send_row[at];
    });
  }

  /// first[r]: the position of the block's first token for rank r. total[r] becomes the end of the used positions of r.
  template <class Team>
  FLEXEP_HD void begin_ranks(const Team& team, int32_t* first, int32_t* total) const {
    const LaneRange mine(WarpLanes<Team>{team}, table.ranks);
    int64_t begin = 0;
    for (int r = mine.begin; r < mine.end; ++r) begin += total[r];
    begin = team.warp_scan(begin);
    for (int r = mine.begin; r < mine.end; ++r) {
      const int32_t at = split < 0 ? static_cast<int32_t>(begin) : r * split;
      if (team.block() == 0) send_counts[r] = total[r];
      begin += total[r];
      first[r] += at;
      total[r] += at;
    }
  }

  template <class Team>
  FLEXEP_HD void clear_unused(const Team& team, const int32_t* used_end) const {
    for (int64_t i = grid_rank(team); i < num_send; i += grid_size(team)) {
      const int r = split < 0 ? table.ranks - 1 : static_cast<int>(i) / split;
      if (i >= used_end[r < table.ranks ? r : table.ranks - 1]) send_token[i] = -1;
    }
  }

  /// The lists of a token's ranks and send positions; slot_send holds the order of those slots that leave, else -1.
  template <class Team>
  FLEXEP_HD void list_ranks(const Team& team, const int32_t* first) const {
    for_warp_slots(team, tokens, top_k, [&](int64_t i, int t, int k, bool valid) {
      if (!valid || slot_send[i] < 0) return;
      const int r = slot_rank[i];
      int lower = 0;  // ranks of the token below r
      for (int64_t j = i - k; j < i - k + top_k; ++j) lower += (slot_send[j] >= 0) & (slot_rank[j] < r);
      const int32_t position = first[r] + slot_send[i];
      send_rank[i - k + lower] = r;
      send_row[i - k + lower] = position;
      if (position < num_send) send_token[position] = t;
    });
  }
};

}  // namespace flexep
