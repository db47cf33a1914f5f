// How many records go between this rank and each other one, hop by hop, from what everybody said.
#pragma once
#include <cstdint>

#include "plan/block.h"
#include "plan/layout.h"
#include "plan/table.h"

namespace flexep {

/// Everybody's counts of distinct tokens, a row a source rank: for each rank, then for each domain, if there are any.
struct SentCounts {
  const int32_t* counts;
  int64_t stride;
  int ranks, domains;

  FLEXEP_HD int size() const { return ranks / domains; }  // of a domain
  FLEXEP_HD int32_t to_rank(int source, int rank) const { return counts[source * stride + rank]; }
  FLEXEP_HD int32_t to_domain(int source, int domain) const {
    return counts[source * stride + ranks + domain];
  }

  /// Records that `relay` sends to `member` of its own domain: tokens of all sources on the relay's rail.
  FLEXEP_HD int32_t relayed(int relay, int member) const {
    int32_t sum = 0;
    for (int source = relay % size(); source < ranks; source += size()) sum += to_rank(source, member);
    return sum;
  }
};

struct PeerCounts {
  static constexpr int kPhases = 1;

  SentCounts sent;
  const int32_t* tokens;  // of each rank, `tokens_stride` apart
  int64_t tokens_stride;
  int rank;

  int32_t* tokens_of;  // out [ranks]
  int32_t* send;       // out [ranks] tokens that this rank sends each rank
  int32_t* recv;       // out [ranks] and gets from each
  int32_t* recv_base;  // out [ranks + 1] the first of those, in source order
  // Over several domains, records of each hop; [ranks] each.
  int32_t* rail_out;
  int32_t* rail_in;
  int32_t* member_out;
  int32_t* member_in;
  int32_t* arrival;     // out [ranks] first record of each source, in the order in which the relays send them
  int32_t* relay_base;  // out [domains + 1] first record of each source domain over the rail

  FLEXEP_HD int64_t items() const { return 1; }
  FLEXEP_HD int64_t shared_ints(int, int) const { return 0; }

  template <int kPhase, class Team>
  FLEXEP_HD void phase(const Team& team, int32_t*) const {
    if (team.block() > 0) return;
    const int R = sent.ranks;
    FLEXEP_ROLLED
    for (int r = team.rank(); r < R; r += team.size()) {
      tokens_of[r] = tokens[r * tokens_stride];
      send[r] = sent.to_rank(rank, r);
      recv[r] = sent.to_rank(r, rank);
      if (sent.domains > 0) count_hops(r);
    }
    team.sync();
    if (team.warp() != 0) return;
    const auto in_order = [](int i) { return i; };
    const int32_t received = scan(team, R, recv_base, [this](int r) { return recv[r]; }, in_order);
    if (team.lane() == 0) recv_base[R] = received;
    if (sent.domains == 0) return;
    const int S = sent.size(), D = sent.domains, mine = rank % S;
    const auto from_domain = [this, S, mine](int d) { return rail_in[d * S + mine]; };
    const int32_t relayed = scan(team, D, relay_base, from_domain, in_order);
    if (team.lane() == 0) relay_base[D] = relayed;
    // Source `i` of the order in which records come: by index in its domain, then by domain.
    const auto source = [S, D](int i) { return i % D * S + i / D; };
    scan(team, R, arrival, [&](int i) { return recv[source(i)]; }, source);
  }

 private:
  FLEXEP_HD void count_hops(int r) const {
    const int S = sent.size();
    const bool on_rail = r % S == rank % S, in_domain = r / S == rank / S;
    rail_out[r] = on_rail ? sent.to_domain(rank, r / S) : 0;
    rail_in[r] = on_rail ? sent.to_domain(r, rank / S) : 0;
    member_out[r] = in_domain ? sent.relayed(rank, r) : 0;
    member_in[r] = in_domain ? sent.relayed(r, rank) : 0;
  }

  /// sums[to(i)] = the sum of value(j) over j < i; returns that of all n. The lanes of one warp call together.
  template <class Team, class Value, class To>
  FLEXEP_HD int32_t scan(const Team& team, int n, int32_t* sums, const Value& value, const To& to) const {
    const LaneRange mine(WarpLanes<Team>{team}, n);
    int32_t sum = 0;
    FLEXEP_ROLLED
    for (int i = mine.begin; i < mine.end; ++i) sum += value(i);
    int32_t below = team.warp_scan(sum);
    FLEXEP_ROLLED
    for (int i = mine.begin; i < mine.end; ++i) {
      sums[to(i)] = below;
      below += value(i);
    }
    return static_cast<int32_t>(team.warp_sum(sum));
  }
};

/// Lengths of a rank's tensors where nothing is dropped, from what everybody said; for a host that has it.
struct ExactSizes {
  int64_t left = 0, received = 0;  // records that leave for ranks or domains; tokens that come from all ranks
  int64_t rows = 0;                // expert-major rows, padded
  int64_t relayed = 0,
          handed = 0;  // records over the rail to here; those that leave for them inside the domain

  /// `counts`: of the places, [ranks] rows as far apart as those of `sent`.
  ExactSizes(const SentCounts& sent, const int32_t* counts, const TableView& table, int alignment, int rank) {
    for (int r = 0; r < sent.ranks; ++r) {
      received += sent.to_rank(r, rank);
      if (sent.domains == 0) left += sent.to_rank(rank, r);
    }
    for (int p = table.rank_begin[rank]; p < table.rank_begin[rank + 1]; ++p) {
      int32_t count = 0;
      for (int source = 0; source < sent.ranks; ++source) count += counts[source * sent.stride + p];
      rows += PlaceLayout::padded(count, alignment);
    }
    for (int d = 0; d < sent.domains; ++d) {
      left += sent.to_domain(rank, d);
      relayed += sent.to_domain(d * sent.size() + rank % sent.size(), rank / sent.size());
    }
    for (int i = 0; sent.domains > 0 && i < sent.size(); ++i)
      handed += sent.relayed(rank, rank / sent.size() * sent.size() + i);
  }
};

}  // namespace flexep
