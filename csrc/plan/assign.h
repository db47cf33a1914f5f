// Step 3 of the plan: the row of every slot, and the order in which one source rank's tokens leave.
//
// Order is fixed: inside a place by (source rank, token, slot); to a rank by token. Lanes own contiguous
// token ranges and learn where their range begins from a scan over lanes, so no atomic decides an order and
// any number of lanes writes the same integers.
#pragma once
#include <cstdint>

#include "base/team.h"
#include "plan/table.h"

namespace flexep {

struct AssignRows {
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
  int32_t* workspace;    // workspace_ints(lanes)

  static FLEXEP_HD long long workspace_ints(int experts, int ranks, int lanes) {
    return static_cast<long long>(lanes) * (experts + 2 * ranks) + ranks;
  }

  template <class Team>
  FLEXEP_HD void operator()(const Team& team) const {
    const int E = table.experts, R = table.ranks, lanes = team.size();
    int32_t* place_cursor = workspace;                                      // [lanes, E]
    int32_t* rank_cursor = workspace + static_cast<long long>(lanes) * E;   // [lanes, R]
    int32_t* last_token = rank_cursor + static_cast<long long>(lanes) * R;  // [lanes, R]
    int32_t* send_begin = last_token + static_cast<long long>(lanes) * R;   // [R]
    const LaneRange mine(team, tokens);

    count_places(team, mine, place_cursor + static_cast<long long>(team.rank()) * E);
    for (int i = team.rank(); i < num_send; i += lanes) send_token[i] = -1;
    team.sync();
    for (int p = team.rank(); p < E; p += lanes) scan_lanes(place_cursor + p, E, lanes, base[p]);
    team.sync();
    place_slots(mine, place_cursor + static_cast<long long>(team.rank()) * E,
                rank_cursor + static_cast<long long>(team.rank()) * R,
                last_token + static_cast<long long>(team.rank()) * R);
    team.sync();
    for (int r = team.rank(); r < R; r += lanes) send_counts[r] = scan_lanes(rank_cursor + r, R, lanes, 0);
    team.sync();
    if (team.rank() == 0) {
      int32_t begin = 0;
      for (int r = 0; r < R; ++r) {
        send_begin[r] = split < 0 ? begin : r * split;
        begin += send_counts[r];
      }
    }
    team.sync();
    place_tokens(mine, rank_cursor + static_cast<long long>(team.rank()) * R,
                 last_token + static_cast<long long>(team.rank()) * R, send_begin);
  }

 private:
  /// Exclusive scan down one column of a [lanes, stride] table, starting from `first`; returns the sum less
  /// `first`.
  static FLEXEP_HD int32_t scan_lanes(int32_t* column, int stride, int lanes, int32_t first) {
    int32_t sum = first;
    for (int l = 0; l < lanes; ++l) {
      const int32_t n = column[static_cast<long long>(l) * stride];
      column[static_cast<long long>(l) * stride] = sum;
      sum += n;
    }
    return sum - first;
  }

  template <class Team>
  FLEXEP_HD void count_places(const Team& team, const LaneRange& mine, int32_t* counts) const {
    for (int p = 0; p < table.experts; ++p) counts[p] = 0;
    if (team.rank() == team.size() - 1) return;  // nobody begins after the last lane
    for (long long i = static_cast<long long>(mine.begin) * top_k;
         i < static_cast<long long>(mine.end) * top_k; ++i) {
      const int p = table.place(topk_idx[i]);
      if (p >= 0) ++counts[p];
    }
  }

  FLEXEP_HD void place_slots(const LaneRange& mine, int32_t* place_cursor, int32_t* rank_count,
                             int32_t* last_token) const {
    for (int r = 0; r < table.ranks; ++r) rank_count[r] = 0, last_token[r] = -1;
    for (int t = mine.begin; t < mine.end; ++t) {
      for (int k = 0; k < top_k; ++k) {
        const long long i = static_cast<long long>(t) * top_k + k;
        const int p = table.place(topk_idx[i]);
        const int r = p < 0 ? -1 : table.rank_of_place[p];
        const int32_t index = p < 0 ? 0 : place_cursor[p]++;
        const bool keep = p >= 0 && index < cut[r];
        slot_row[i] = keep ? start[p] + index : -1;
        slot_rank[i] = keep ? r : -1;
        if (keep && last_token[r] != t) last_token[r] = t, ++rank_count[r];
      }
    }
  }

  FLEXEP_HD void place_tokens(const LaneRange& mine, int32_t* rank_cursor, int32_t* rank_position,
                              const int32_t* send_begin) const {
    for (int t = mine.begin; t < mine.end; ++t) {
      const long long row = static_cast<long long>(t) * top_k;
      int n = 0;  // distinct ranks of this token so far, kept ascending by insertion: top_k is at most 32
      for (int k = 0; k < top_k; ++k) {
        const int32_t r = slot_rank[row + k];
        int at = n;
        while (at > 0 && send_rank[row + at - 1] > r) --at;
        if (r < 0 || (at > 0 && send_rank[row + at - 1] == r)) continue;
        for (int j = n; j > at; --j) send_rank[row + j] = send_rank[row + j - 1];
        send_rank[row + at] = r;
        ++n;
      }
      for (int j = 0; j < n; ++j) {
        const int32_t r = send_rank[row + j];
        const int32_t position = send_begin[r] + rank_cursor[r]++;
        send_row[row + j] = rank_position[r] = position;
        send_token[position] = t;
      }
      for (int j = n; j < top_k; ++j) send_rank[row + j] = send_row[row + j] = -1;
      for (int k = 0; k < top_k; ++k) {
        const int32_t r = slot_rank[row + k];
        slot_send[row + k] = r < 0 ? -1 : rank_position[r];
      }
    }
  }
};

}  // namespace flexep
