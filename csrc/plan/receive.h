// Step 4 of the plan: the receiver's side. Row metadata travels with each token; here it is packed by the
// source and turned into maps by the receiver.
//
// One metadata row: { source token, destination row of slot 0..K-1 or -1 [, weight of slot 0..K-1 as fp32
// bits] }.
#pragma once
#include <cstdint>

#include "base/team.h"

namespace flexep {

struct PackMeta {
  const int32_t* slot_row;    // [tokens, top_k]
  const int32_t* slot_send;   // [tokens, top_k]
  const int32_t* send_token;  // [num_send]
  const int32_t*
      weights_bits;  // [tokens, top_k] fp32 bits; not read unless has_weights (an empty tensor is null too)
  bool has_weights;
  int tokens, top_k, num_send;
  int32_t* meta;  // out [num_send, 1 + top_k (+ top_k)]

  template <class Team>
  FLEXEP_HD void operator()(const Team& team) const {
    const int width = 1 + top_k * (has_weights ? 2 : 1);
    for (int i = team.rank(); i < num_send; i += team.size()) {
      int32_t* row = meta + static_cast<long long>(i) * width;
      row[0] = send_token[i];
      for (int k = 0; k < top_k; ++k) row[1 + k] = -1;
      for (int k = 1 + top_k; k < width; ++k) row[k] = 0;
    }
    team.sync();
    for (int t = team.rank(); t < tokens; t += team.size()) {
      for (int k = 0; k < top_k; ++k) {
        const long long i = static_cast<long long>(t) * top_k + k;
        if (slot_send[i] < 0) continue;
        int32_t* row = meta + static_cast<long long>(slot_send[i]) * width;
        row[1 + k] = slot_row[i];
        if (has_weights) row[1 + top_k + k] = weights_bits[i];
      }
    }
  }
};

/// The transpose of a row map: which (received row, slot) fills each expert-major row.
struct InvertRows {
  const int32_t* rows;  // [received, top_k] expert-major row or -1
  int received, top_k, num_rows;
  int32_t* row_src;  // out [num_rows] received row * top_k + slot; -1 padding

  template <class Team>
  FLEXEP_HD void operator()(const Team& team) const {
    for (int i = team.rank(); i < num_rows; i += team.size()) row_src[i] = -1;
    team.sync();
    const long long n = static_cast<long long>(received) * top_k;
    for (long long i = team.rank(); i < n; i += team.size())
      if (rows[i] >= 0 && rows[i] < num_rows) row_src[rows[i]] = static_cast<int32_t>(i);
  }
};

/// Keeps the rows of a padded receive buffer that hold a token with a slot here, in order.
struct CompactRows {
  const int32_t* rows;       // [padded, top_k] expert-major row or -1
  const int32_t* rows_rank;  // [padded, top_k] rank that each row is on, or null: all are on `rank`
  int rank;
  int padded, top_k, num_compact;
  int32_t* source;        // out [num_compact] padded row at each compact row; -1 tail
  int32_t* compact_rows;  // out [num_compact, top_k] the kept rows' entries on `rank`; -1 elsewhere
  int32_t* workspace;     // [lanes]

  template <class Team>
  FLEXEP_HD void operator()(const Team& team) const {
    const LaneRange mine(team, padded);
    int32_t n = 0;
    for (int i = mine.begin; i < mine.end; ++i) n += is_kept(i);
    workspace[team.rank()] = n;
    for (int i = team.rank(); i < num_compact; i += team.size()) source[i] = -1;
    for (long long i = team.rank(); i < static_cast<long long>(num_compact) * top_k; i += team.size())
      compact_rows[i] = -1;
    team.sync();
    int at = 0;
    for (int l = 0; l < team.rank(); ++l) at += workspace[l];
    for (int i = mine.begin; i < mine.end; ++i) {
      if (!is_kept(i) || at >= num_compact) continue;
      source[at] = i;
      for (int k = 0; k < top_k; ++k) compact_rows[static_cast<long long>(at) * top_k + k] = entry(i, k);
      ++at;
    }
  }

 private:
  FLEXEP_HD int32_t entry(int i, int k) const {
    const long long at = static_cast<long long>(i) * top_k + k;
    return rows_rank && rows_rank[at] != rank ? -1 : rows[at];
  }
  FLEXEP_HD bool is_kept(int i) const {
    for (int k = 0; k < top_k; ++k)
      if (entry(i, k) >= 0) return true;
    return false;
  }
};

}  // namespace flexep
