// Step 3 of the plan: the row of every slot, and the records that one source rank's tokens send ahead of them.
//
// Order is fixed: inside a place by (source rank, token, slot); to a rank or a domain by token.
#pragma once
#include <cstdint>

#include "plan/counts.h"
#include "plan/records.h"
#include "plan/resolve.h"
#include "plan/send_order.h"

namespace flexep {

/// Phase 0 gives rows to slots, which CountSlots has numbered, and numbers the tokens that leave for each owner; phase 1
/// gives those their positions and writes their records.
struct AssignRows {
  static constexpr int kPhases = 2;

  Integers topk_idx;  // [tokens, top_k]
  TableView table;
  const int32_t* number;        // of CountSlots, by a launch of as many blocks
  const int32_t* place_counts;  // its workspace
  int place_stride;             // and its keys
  const int32_t* base;          // [experts] this source's row of ResolveRows::base
  const int32_t* start;         // [experts]
  const int32_t* cut;           // [ranks]
  int domains;                  // what tokens leave for; 0: for ranks
  const int32_t* weights;       // [tokens, top_k] fp32 bits, or null

  int32_t* slot_row;     // out [tokens, top_k] row on the destination rank; -1 empty or dropped
  int32_t* slot_rank;    // out [tokens, top_k] destination rank; -1 likewise
  SendOrder order;       // counts: behind rank_counts, if there are domains
  int32_t* rank_counts;  // out [ranks] tokens with a row on each rank, if there are domains
  Records records;       // what leaves; no memory: nothing does
  int32_t* workspace;    // workspace_ints(blocks)

  FLEXEP_HD int64_t items() const { return static_cast<int64_t>(order.rows) * order.top_k; }
  FLEXEP_HD int64_t workspace_ints(int blocks) const {
    return static_cast<int64_t>(blocks) * (table.ranks + domains);
  }
  FLEXEP_HD int64_t shared_ints(int warps, int lanes) const {
    const int64_t E = table.experts, R = table.ranks, owners = domains > 0 ? domains : R;
    const int64_t sum = E + BlockCounts::scratch_ints(table.experts, lanes);
    const int64_t number = E + SendOrder::numbering_ints(static_cast<int>(owners), warps) +
                           (domains > 0 ? SendOrder::numbering_ints(table.ranks, warps) : 0);
    const int64_t most = sum > number ? sum : number;
    const int64_t place = SendOrder::placing_ints(table.ranks, lanes);
    return most > place ? most : place;
  }

  template <int kPhase, class Team>
  FLEXEP_HD void phase(const Team& team, int32_t* shared) const {
    if constexpr (kPhase == 0)
      place_slots(team, shared);
    else
      place_tokens(team, shared);
  }

 private:
  FLEXEP_HD auto ranks() const {
    return [this](int t) { return slot_rank + static_cast<int64_t>(t) * order.top_k; };
  }
  FLEXEP_HD int32_t* block_ranks() const { return workspace; }  // [blocks, ranks], if there are domains
  FLEXEP_HD int32_t* block_owners(int blocks) const {
    return workspace + (domains > 0 ? static_cast<int64_t>(blocks) * table.ranks : 0);
  }

  template <class Team>
  FLEXEP_HD void place_slots(const Team& team, int32_t* shared) const {
    const int E = table.experts;
    int32_t* const first = shared;  // [experts] number of the block's first slot among those of the place
    int32_t* const rest = shared + E;
    const BlockCounts blocks{place_counts, team.blocks(), place_stride, E};
    blocks.sum(team, team.block(), first, nullptr, rest);
    FLEXEP_ROLLED
    for (int p = team.rank(); p < E; p += team.size()) first[p] += base[p];
    team.sync();
    struct Read {
      int32_t number = -1;
      int place = 0, rank = 0;
    };
    const auto read = [&](int64_t i, int, int) {
      const int64_t id = topk_idx[i];
      const int32_t its = number[i];
      if (its < 0) return Read{};
      const int p = table.place_of_expert[id];
      return Read{its, p, table.rank_of_place[p]};
    };
    const auto find_rank = [&](const Read& slot, int64_t i) {
      int32_t row = -1, rank = -1;
      if (slot.number >= 0) {
        const int32_t mine = first[slot.place] + slot.number;
        if (mine < cut[slot.rank]) row = start[slot.place] + mine, rank = slot.rank;
      }
      slot_row[i] = row;
      return slot_rank[i] = rank;
    };
    order.number(team, block_owners(team.blocks()), rest, read, find_rank, ranks());
    if (domains > 0) count_ranks(team, rest + SendOrder::numbering_ints(domains, team.warps()));
  }

  template <class Team>
  FLEXEP_HD void count_ranks(const Team& team, int32_t* shared) const {
    const KeyCounts ranks{shared, table.ranks};
    const FirstSlots first(team, shared + KeyCounts::ints(table.ranks, team.warps()), table.ranks);
    ranks.clear(team);
    const auto read = [this](int64_t i, int, int) { return slot_rank[i]; };
    for_warp_slots(team, order.rows, order.top_k, read, [&](int rank, int64_t, int t, int k, bool valid) {
      count_first(team, first, ranks, valid ? rank : -1, t, k);
    });
    ranks.finish(team, block_ranks() + static_cast<int64_t>(team.block()) * table.ranks);
  }

  template <class Team>
  FLEXEP_HD void place_tokens(const Team& team, int32_t* shared) const {
    if (domains > 0 && team.block() == 0) {
      const BlockCounts blocks{block_ranks(), team.blocks(), table.ranks, table.ranks};
      blocks.sum(team, team.blocks(), rank_counts, nullptr, shared);
    }
    const auto slots = [this](int t) {
      const int64_t at = static_cast<int64_t>(t) * order.top_k;
      return TokenSlots{t, slot_rank + at, slot_row + at, weights ? weights + at : nullptr};
    };
    order.place(team, block_owners(team.blocks()), shared, slots, records);
  }
};

/// ResolveRows and AssignRows in the phases of one: every block lays out all ranks by itself in shared memory, and the
/// first one says what was asked for. Of AssignRows `base`, `start` and `cut` are not read, of ResolveRows `base` and
/// `cut` not written.
struct ResolveAndAssign : AssignRows {
  ResolveRows resolve;  // of this source

  FLEXEP_HD int64_t shared_ints(int warps, int lanes) const {
    return layout_ints() + AssignRows::shared_ints(warps, lanes);
  }

  template <int kPhase, class Team>
  FLEXEP_HD void phase(const Team& team, int32_t* shared) const {
    if constexpr (kPhase == 0) {
      const ResolveRows layout = resolved_in(shared, team.block() == 0);
      layout.lay_out(team, 0, 1);
      team.sync();
      if (team.block() == 0) copy_out(team, layout);
      AssignRows assign = *this;
      assign.base = layout.base, assign.start = layout.start, assign.cut = layout.cut;
      assign.phase<0>(team, shared + layout_ints());
    } else {
      AssignRows::phase<kPhase>(team, shared);
    }
  }

 private:
  FLEXEP_HD int64_t layout_ints() const { return 4 * static_cast<int64_t>(table.experts) + table.ranks; }
  /// What is read again lies in `memory`; what is only written goes where it is asked for, if this block is `asked`.
  FLEXEP_HD ResolveRows resolved_in(int32_t* memory, bool asked) const {
    const int E = table.experts;
    ResolveRows layout = resolve;
    layout.base = memory, layout.start = memory + E, layout.kept = memory + 2 * E;
    layout.cut = memory + 4 * E;
    if (!asked) layout.dropped = memory + 3 * E, layout.padded = nullptr, layout.num_rows = nullptr;
    return layout;
  }
  template <class Team>
  FLEXEP_HD void copy_out(const Team& team, const ResolveRows& layout) const {
    FLEXEP_ROLLED
    for (int p = team.rank(); p < table.experts; p += team.size())
      resolve.start[p] = layout.start[p], resolve.kept[p] = layout.kept[p];
  }
};

}  // namespace flexep
