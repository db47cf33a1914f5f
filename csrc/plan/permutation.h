// The plan of one rank in two phases: what CountSlots, ResolveRows, AssignRows and InvertRows say for R = 1, with no
// send order. Ids may be int32 or int64 and may lie outside the experts.
#pragma once
#include <cstdint>

#include "plan/integers.h"
#include "plan/layout.h"
#include "plan/numbering.h"

namespace flexep {

/// Phase 0 numbers the slots of each expert inside a block. In phase 1 every block works out the same layout from the
/// blocks' counts, which is cheaper than waiting for one that does, and writes its part of the maps.
struct PlanPermutation {
  static constexpr int kPhases = 2;

  Integers topk_idx;  // [tokens, top_k] expert ids; those outside [0, experts) are empty
  int tokens, top_k, experts, alignment;
  int64_t capacity;  // length of row_src and rows that may be used; < 0: as many as there are

  int32_t* ids;      // out [tokens, top_k] ids as int32, -1 where empty; may be null
  int32_t* row_map;  // out [tokens, top_k] row of each slot; -1 empty or dropped
  int32_t*
      row_src;      // out [capacity], or the rows in use at least: slot t * top_k + k of each row, -1 padding
  int32_t* counts;  // out [experts] rows kept
  int32_t* padded;  // out [experts] the same, padded
  int32_t* dropped;    // out [experts] rows that the capacity refused
  int32_t* outside;    // out [1] ids that are neither -1 nor an expert
  int64_t* num_rows;   // out [1] rows in use, padding included
  int32_t* workspace;  // workspace_ints(blocks)

  FLEXEP_HD int64_t items() const { return static_cast<int64_t>(tokens) * top_k; }
  FLEXEP_HD int64_t workspace_ints(int blocks) const { return static_cast<int64_t>(blocks) * keys(); }
  FLEXEP_HD int64_t shared_ints(int warps, int lanes) const {
    const int64_t number = KeyCounts::ints(keys(), warps);
    const int64_t place = 4 * static_cast<int64_t>(experts) + 2 + BlockCounts::scratch_ints(keys(), lanes);
    return number > place ? number : place;
  }

  template <int kPhase, class Team>
  FLEXEP_HD void phase(const Team& team, int32_t* shared) const {
    if constexpr (kPhase == 0)
      number_slots(team, shared);
    else
      place_slots(team, shared);
  }

 private:
  FLEXEP_HD int keys() const { return experts + 1; }  // the last one counts ids outside

  FLEXEP_HD int key(int64_t i) const {
    const int64_t e = topk_idx[i];
    return e >= 0 && e < experts ? static_cast<int>(e) : e == -1 ? -1 : experts;
  }

  struct Numbered {
    int key = -1;
    int32_t number = -1;
  };
  /// What is known of a slot once it is numbered, among those of its block in the end.
  FLEXEP_HD auto numbered() const {
    return [this](int64_t i, int, int) { return Numbered{key(i), row_map[i]}; };
  }

  template <class Team>
  FLEXEP_HD void number_slots(const Team& team, int32_t* shared) const {
    const KeyCounts seen{shared, keys()};
    seen.clear(team);
    const auto read = [this](int64_t i, int, int) { return key(i); };
    for_warp_slots(team, tokens, top_k, read, [&](int key, int64_t i, int, int, bool valid) {
      const int e = valid ? key : -1;
      const int32_t number = seen.add(team, e, team.peers(e));
      if (!valid) return;
      row_map[i] = number;
      if (ids) ids[i] = e < experts ? e : -1;
    });
    seen.finish(team, workspace + static_cast<int64_t>(team.block()) * keys());
    if (team.warps() == 1) return;
    for_warp_slots(team, tokens, top_k, numbered(), [&](const Numbered& slot, int64_t i, int, int, bool) {
      if (slot.key >= 0) row_map[i] = slot.number + seen.below(team, slot.key);
    });
  }

  template <class Team>
  FLEXEP_HD void place_slots(const Team& team, int32_t* shared) const {
    const int E = experts;
    // [experts] each: number of the block's first slot of the expert; first row, rows kept, rows dropped.
    int32_t *const first = shared, *const start = shared + E, *const kept = shared + 2 * E,
                   *const lost = shared + 3 * E;
    int32_t *const limits = shared + 4 * E, *const scratch = limits + 2;  // cut and rows in use
    const BlockCounts blocks{workspace, team.blocks(), keys(), E};
    blocks.sum(team, team.block(), first, kept, scratch);
    if (team.warp() == 0) {
      const PlaceLayout::Result result = PlaceLayout{start, kept, lost, E, alignment, capacity}(team);
      if (team.lane() == 0) limits[0] = result.cut, limits[1] = static_cast<int32_t>(result.rows);
    }
    team.sync();
    const int32_t cut = limits[0], rows = limits[1];
    if (team.block() == 0) report(team, kept, lost, rows, scratch);
    clear_padding(team, start, kept, rows);
    for_warp_slots(team, tokens, top_k, numbered(), [&](const Numbered& slot, int64_t i, int, int, bool) {
      const int e = slot.key;
      if (e < 0) return;
      const int32_t number = e < E ? first[e] + slot.number : cut;
      const int32_t row = number < cut ? start[e] + number : -1;
      row_map[i] = row;
      if (row >= 0) row_src[row] = static_cast<int32_t>(i);
    });
  }

  template <class Team>
  FLEXEP_HD void report(const Team& team, const int32_t* kept, const int32_t* lost, int32_t rows,
                        int32_t* scratch) const {
    for (int e = team.rank(); e < experts; e += team.size()) {
      counts[e] = kept[e];
      padded[e] = static_cast<int32_t>(pad(kept[e]));
      dropped[e] = lost[e];
    }
    if (team.rank() == 0) *num_rows = rows;
    const BlockCounts strays{workspace + experts, team.blocks(), keys(), 1};
    strays.sum(team, team.blocks(), outside, nullptr, scratch);
  }

  /// Rows that no slot fills: behind each expert's, and past the last expert's where the length is given.
  template <class Team>
  FLEXEP_HD void clear_padding(const Team& team, const int32_t* start, const int32_t* kept,
                               int32_t rows) const {
    const WarpRange mine(team, experts);
    for (int e = mine.begin; e < mine.end; ++e)
      for (int64_t i = kept[e] + team.lane(); i < pad(kept[e]); i += team.width()) row_src[start[e] + i] = -1;
    for (int64_t i = rows + grid_rank(team); i < capacity; i += grid_size(team)) row_src[i] = -1;
  }

  FLEXEP_HD int64_t pad(int32_t count) const { return PlaceLayout::padded(count, alignment); }
};

}  // namespace flexep
