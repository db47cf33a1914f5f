// A Team is anything with rank(), size() and sync(): one thread, a warp, a CTA, a group of threads.
// Code over a Team splits its work by rank and meets at sync(); a sync also makes every lane's earlier
// writes visible to all lanes of the team.
#pragma once
#include "base/hd.h"

namespace flexep {

/// One lane. Nothing to meet, nothing to publish.
struct Solo {
  FLEXEP_HD int rank() const { return 0; }
  FLEXEP_HD int size() const { return 1; }
  FLEXEP_HD void sync() const {}
};

/// One of so many lanes that share work and never meet.
struct Lane {
  int number, count;
  FLEXEP_HD constexpr int rank() const { return number; }
  FLEXEP_HD constexpr int size() const { return count; }
};

/// The half-open range of [0, n) that lane `rank` of `size` owns: contiguous, so that lane order is index
/// order.
struct LaneRange {
  int begin, end;
  template <class Team>
  FLEXEP_HD LaneRange(const Team& team, int n)
      : begin(static_cast<int>(static_cast<long long>(n) * team.rank() / team.size())),
        end(static_cast<int>(static_cast<long long>(n) * (team.rank() + 1) / team.size())) {}
};

}  // namespace flexep
