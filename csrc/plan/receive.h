// Step 4 of the plan: the receiver's side. The records that came are turned into maps.
#pragma once
#include <cstdint>

#include "plan/numbering.h"
#include "plan/peers.h"
#include "plan/records.h"

namespace flexep {

/// What not every record writes, cleared before ReceiveRows.
struct ClearRows {
  static constexpr int kPhases = 1;

  int num_rows;
  // As in ReceiveRows.
  int32_t* row_src;
  int32_t* row_weights;
  int32_t* row_map;

  FLEXEP_HD int64_t items() const { return num_rows; }
  FLEXEP_HD int64_t shared_ints(int, int) const { return 0; }

  template <int kPhase, class Team>
  FLEXEP_HD void phase(const Team& team, int32_t*) const {
    FLEXEP_ROLLED
    for (int64_t i = grid_rank(team); i < num_rows; i += grid_size(team)) {
      row_src[i] = -1;
      if (row_weights) row_weights[i] = 0;
      if (row_map) row_map[i] = -1;
    }
  }
};

/// Before records come: who sends how many, and rows cleared. Neither reads what the other writes.
struct ExpectRows {
  static constexpr int kPhases = 1;

  PeerCounts peers;
  ClearRows rows;

  FLEXEP_HD int64_t shared_ints(int, int) const { return 0; }

  template <int kPhase, class Team>
  FLEXEP_HD void phase(const Team& team, int32_t* shared) const {
    rows.phase<0>(team, shared);
    peers.phase<0>(team, shared);
  }
};

/// Records into lists in (source rank, token) order, and the transpose of their row map, a lane a slot. ClearRows has
/// run before.
struct ReceiveRows {
  static constexpr int kPhases = 1;

  const int32_t* meta;  // [received, width]
  RecordShape shape;
  int received, num_rows, ranks;
  const int32_t*
      base;  // [ranks + 1] first row of each source; null: all `received` rows have come, as they are
  const int32_t* arrival;  // [ranks] first record of each source; null: they have come in order
  int experts;             // of this rank
  const int32_t* start;    // [experts] the first row of each; null if `expert` is

  int32_t* token;        // out [received] token at its source; -1 tail
  int32_t* rows;         // out [received, top_k] expert-major row of each slot; -1 elsewhere
  int32_t* weights;      // out [received, top_k] bits, 0 elsewhere; or null
  int32_t* expert;       // out [received, top_k] expert of each slot; -1 elsewhere; or null
  int32_t* row_src;      // out [num_rows] received row * top_k + slot that fills each row; -1 padding
  int32_t* row_weights;  // out [num_rows] its weight, 0 on padding; or null
  int32_t* row_map;      // out [num_rows] the received row alone; -1 padding; or null
  int32_t* order;        // out [received] record of each row, -1 tail; null with `arrival`

  FLEXEP_HD int64_t items() const { return static_cast<int64_t>(received) * shape.top_k; }
  FLEXEP_HD int64_t shared_ints(int, int) const { return 0; }

  template <int kPhase, class Team>
  FLEXEP_HD void phase(const Team& team, int32_t*) const {
    const int64_t used = base ? base[ranks] : received;
    if constexpr (requires { Team::kOneLane; }) {  // the same, with no division
      for (int n = 0; n < received; ++n) {
        const int64_t place = place_of(n, used);
        for (int k = 0; k < shape.top_k; ++k) write(team, read(n, k, place));
      }
      return;
    }
    constexpr int kBatch = 3;  // slots whose records are on their way
    const auto top_k = static_cast<uint32_t>(shape.top_k);
    FLEXEP_ROLLED
    for (int64_t first = grid_rank(team); first < items(); first += kBatch * grid_size(team)) {
      Read slots[kBatch];
      FLEXEP_UNROLL
      for (int j = 0; j < kBatch; ++j) {
        const int64_t i = first + j * grid_size(team);
        const auto slot = static_cast<uint32_t>(i);
        const int n = static_cast<int>(slot / top_k);
        if (i < items()) slots[j] = read(n, static_cast<int>(slot % top_k), place_of(n, used));
      }
      FLEXEP_UNROLL
      for (int j = 0; j < kBatch; ++j)
        if (first + j * grid_size(team) < items()) write(team, slots[j]);
    }
  }

 private:
  /// The record of a row; -1: none has come.
  FLEXEP_HD int64_t place_of(int n, int64_t used) const {
    const int64_t place = n < used ? record_of(n) : -1;
    return place < received ? place : -1;  // counts that never arrived may say anything
  }

  FLEXEP_HD int64_t record_of(int n) const {
    if (!arrival) return n;
    const int source = last_not_above(base, ranks, n);
    return static_cast<int64_t>(arrival[source]) + n - base[source];
  }

  /// The last of `count` ascending numbers that is at most `value`; 0 if none is.
  FLEXEP_HD static int last_not_above(const int32_t* numbers, int count, int value) {
    int low = 0, high = count;
    while (high - low > 1) {
      const int middle = low + (high - low) / 2;
      (numbers[middle] <= value ? low : high) = middle;
    }
    return low;
  }

  /// A slot of a received row, and what its record says of it.
  struct Read {
    int n, k;
    int32_t place, token, row, weight;
  };
  FLEXEP_HD Read read(int n, int k, int64_t place) const {
    const bool came = place >= 0;
    const int32_t* const record = meta + (came ? place : 0) * shape.width();
    return {n,
            k,
            static_cast<int32_t>(place),
            came && k == 0 ? record[0] : -1,
            came ? record[shape.row(k)] : -1,
            came && shape.has_weights ? record[shape.weight(k)] : 0};
  }

  template <class Team>
  FLEXEP_HD void write(const Team& team, const Read& slot) const {
    const auto [n, k, place, its_token, row, weight] = slot;
    const int64_t at = static_cast<int64_t>(n) * shape.top_k + k;
    if (k == 0) token[n] = its_token;
    if (k == 0 && order) order[n] = place;
    rows[at] = row;
    if (weights) weights[at] = weight;
    if (expert) expert[at] = row < 0 ? -1 : last_not_above(start, experts, row);
    const bool fills = static_cast<uint32_t>(row) < static_cast<uint32_t>(num_rows);
    scatter_if(team, fills, row_src, row, static_cast<int32_t>(at));
    if (row_weights) scatter_if(team, fills, row_weights, row, weight);
    if (row_map) scatter_if(team, fills, row_map, row, n);
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
