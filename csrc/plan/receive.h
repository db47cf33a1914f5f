// Step 4 of the plan: the receiver's side. Row metadata travels with each token; here it is packed by the
// source and turned into maps by the receiver.
//
// One metadata row: { source token, destination row of slot 0..K-1 or -1 [, weight of slot 0..K-1 as fp32
// bits] }.
#pragma once
#include <cstdint>

#include "plan/numbering.h"

namespace flexep {

/// Phase 0 writes rows without slots, phase 1 the slots.
struct PackMeta {
  static constexpr int kPhases = 2;

  const int32_t* slot_row;    // [tokens, top_k]
  const int32_t* slot_send;   // [tokens, top_k]
  const int32_t* send_token;  // [num_send]
  const int32_t*
      weights_bits;  // [tokens, top_k] fp32 bits; not read unless has_weights (an empty tensor is null too)
  bool has_weights;
  int tokens, top_k, num_send;
  int32_t* meta;  // out [num_send, 1 + top_k (+ top_k)]

  FLEXEP_HD int width() const { return 1 + top_k * (has_weights ? 2 : 1); }
  FLEXEP_HD int64_t items() const { return static_cast<int64_t>(num_send) * width(); }
  FLEXEP_HD int64_t shared_ints(int, int) const { return 0; }

  template <int kPhase, class Team>
  FLEXEP_HD void phase(const Team& team, int32_t*) const {
    if constexpr (kPhase == 0)
      clear_rows(team);
    else
      fill_slots(team);
  }

 private:
  /// A warp takes one row after the other.
  template <class Team>
  FLEXEP_HD void clear_rows(const Team& team) const {
    const WarpRange mine(team, num_send);
    for (int i = mine.begin; i < mine.end; ++i) {
      int32_t* const row = meta + static_cast<int64_t>(i) * width();
      if (team.lane() == 0) row[0] = send_token[i];
      for (int k = 1 + team.lane(); k <= top_k; k += team.width()) row[k] = -1;
      for (int k = 1 + top_k + team.lane(); k < width(); k += team.width()) row[k] = 0;
    }
  }

  template <class Team>
  FLEXEP_HD void fill_slots(const Team& team) const {
    for_warp_slots(team, tokens, top_k, [&](int64_t i, int, int k, bool valid) {
      if (!valid || slot_send[i] < 0) return;
      int32_t* const row = meta + static_cast<int64_t>(slot_send[i]) * width();
      row[1 + k] = slot_row[i];
      if (has_weights) row[1 + top_k + k] = weights_bits[i];
    });
  }
};

/// The transpose of a row map: which (received row, slot) fills each expert-major row.
struct InvertRows {
  static constexpr int kPhases = 2;

  const int32_t* rows;  // [received, top_k] expert-major row or -1
  int received, top_k, num_rows;
  int32_t* row_src;  // out [num_rows] received row * top_k + slot; -1 padding

  FLEXEP_HD int64_t entries() const { return static_cast<int64_t>(received) * top_k; }
  FLEXEP_HD int64_t items() const { return entries() > num_rows ? entries() : num_rows; }
  FLEXEP_HD int64_t shared_ints(int, int) const { return 0; }

  template <int kPhase, class Team>
  FLEXEP_HD void phase(const Team& team, int32_t*) const {
    if constexpr (kPhase == 0) {
      for (int64_t i = grid_rank(team); i < num_rows; i += grid_size(team)) row_src[i] = -1;
    } else {
      for (int64_t i = grid_rank(team); i < entries(); i += grid_size(team))
        if (rows[i] >= 0 && rows[i] < num_rows) row_src[rows[i]] = static_cast<int32_t>(i);
    }
  }
};

/// Keeps the rows of a padded receive buffer that hold a token with a slot here, in order. Phase 0: every block counts
/// its own. Phase 1: it counts again, now knowing what lower blocks have, and writes.
struct CompactRows {
  static constexpr int kPhases = 2;

  const int32_t* rows;       // [padded, top_k] expert-major row or -1
  const int32_t* rows_rank;  // [padded, top_k] rank that each row is on, or null: all are on `rank`
  int rank;
  int padded, top_k, num_compact;
  int32_t* source;        // out [num_compact] padded row at each compact row; -1 tail
  int32_t* compact_rows;  // out [num_compact, top_k] the kept rows' entries on `rank`; -1 elsewhere
  int32_t* workspace;     // workspace_ints(blocks)

  FLEXEP_HD int64_t items() const { return padded > num_compact ? padded : num_compact; }
  FLEXEP_HD int64_t workspace_ints(int blocks) const { return blocks; }
  FLEXEP_HD int64_t shared_ints(int warps, int lanes) const {
    return 3 + (warps > BlockCounts::scratch_ints(1, lanes) ? warps : BlockCounts::scratch_ints(1, lanes));
  }

  template <int kPhase, class Team>
  FLEXEP_HD void phase(const Team& team, int32_t* shared) const {
    int32_t *const below = shared, *const total = shared + 1, *const rest = shared + 2;
    if constexpr (kPhase == 1) {
      const BlockCounts blocks{workspace, team.blocks(), 1, 1};
      blocks.sum(team, team.block(), below, total, rest);
    }
    const KeyCounts kept{rest, 1};
    const WarpRange mine(team, padded);
    kept.clear(team);
    for (int at = mine.begin; at < mine.end; at += team.width()) {
      const int i = at + team.lane();
      const bool keep = i < mine.end && is_kept(i);
      kept.add(team, keep ? 0 : -1, team.ballot(keep));
    }
    kept.finish(team, kPhase == 0 ? workspace + team.block() : rest + team.warps());
    if constexpr (kPhase == 1) write(team, mine, *below + kept.below(team, 0), *total);
  }

 private:
  template <class Team>
  FLEXEP_HD void write(const Team& team, const WarpRange& mine, int next, int total) const {
    for (int at = mine.begin; at < mine.end; at += team.width()) {
      const int i = at + team.lane();
      const bool keep = i < mine.end && is_kept(i);
      const uint32_t kept = team.ballot(keep);
      const int to = next + count_bits(kept & lanes_below(team.lane()));
      next += count_bits(kept);
      if (!keep || to >= num_compact) continue;
      source[to] = i;
      for (int k = 0; k < top_k; ++k) compact_rows[static_cast<int64_t>(to) * top_k + k] = entry(i, k);
    }
    for (int64_t i = total + grid_rank(team); i < num_compact; i += grid_size(team)) {
      source[i] = -1;
      for (int k = 0; k < top_k; ++k) compact_rows[i * top_k + k] = -1;
    }
  }

  FLEXEP_HD int32_t entry(int i, int k) const {
    const int64_t at = static_cast<int64_t>(i) * top_k + k;
    return rows_rank && rows_rank[at] != rank ? -1 : rows[at];
  }
  FLEXEP_HD bool is_kept(int i) const {
    for (int k = 0; k < top_k; ++k)
      if (entry(i, k) >= 0) return true;
    return false;
  }
};

}  // namespace flexep
