// Domains of consecutive ranks, and the lines between them. Domain d holds ranks [d * S, (d + 1) * S); the ranks with
// one index in all domains are a rail. A row for another domain crosses the rail once, to the rank there with its
// source's index (the relay), which hands it on inside the domain; partial sums come back the same way.
#pragma once
#include "base/hd.h"
#include "proto/words.h"

namespace flexep {

struct Topology {
  int ranks;
  int domain_size;  // S; `ranks` for one flat domain

  FLEXEP_HD constexpr int domains() const { return ranks / domain_size; }
  FLEXEP_HD constexpr int domain(int rank) const { return rank / domain_size; }
  FLEXEP_HD constexpr int index(int rank) const { return rank % domain_size; }
  FLEXEP_HD constexpr int rank_of(int domain, int index) const { return domain * domain_size + index; }
  /// The rank of `rank`'s domain that stands for `source` there: source itself at home.
  FLEXEP_HD constexpr int relay(int source, int rank) const { return rank_of(domain(rank), index(source)); }

  /// Between two ranks directly, for mail, push and pull.
  FLEXEP_HD static constexpr Line direct(int me, int peer) { return {peer, peer, me}; }

  /// Second hop, seen from the relay: its line to `member` of its own domain for rows of `source`.
  /// A relay reads words by (source domain, member), a member reads them by source.
  FLEXEP_HD constexpr Line from_relay(int source, int member) const {
    return {member, domain(source) * domain_size + index(member), source};
  }
  /// Second hop, seen from a member: its line to the relay of `source` in its own domain.
  FLEXEP_HD constexpr Line to_relay(int source, int me) const {
    return {relay(source, me), source, domain(source) * domain_size + index(me)};
  }
};

}  // namespace flexep
