// A Team is anything with rank(), size() and sync(): one thread, a warp, a CTA, a group of threads.
// Code over a Team splits its work by rank and meets at sync(); a sync also makes every lane's earlier
// writes visible to all lanes of the team.
#pragma once
#include <cstdint>

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

/// The half-open range of [0, n) that one of `parts` owns: contiguous, in order, and the first ones longer by one where
/// they cannot be alike. One 32-bit division: a GPU has no 64-bit one.
struct Share {
  int begin, end;
  FLEXEP_HD constexpr explicit Share(int n) : begin(0), end(n) {}  // all of it
  FLEXEP_HD constexpr Share(int n, int part, int parts) : begin(0), end(0) {
    const auto each = static_cast<int>(static_cast<std::uint32_t>(n) / static_cast<std::uint32_t>(parts));
    const int longer = n - each * parts;
    begin = each * part + (part < longer ? part : longer);
    end = begin + each + (part < longer);
  }
};

/// That of a lane of a team: lane order is index order.
struct LaneRange : Share {
  template <class Team>
  FLEXEP_HD LaneRange(const Team& team, int n) : Share(n, team.rank(), team.size()) {}
};

}  // namespace flexep
