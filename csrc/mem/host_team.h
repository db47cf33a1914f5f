// A Team of host threads, and the Team of one that most host roles are.
#pragma once
#include <barrier>

#include "base/team.h"

namespace flexep {

/// One lane that can also broadcast, as a role's Team must.
struct SoloTeam : Solo {
  int broadcast(int value) const { return value; }
};

/// What the lanes of one role share.
struct Meeting {
  explicit Meeting(int lanes) : barrier(lanes) {}
  std::barrier<> barrier;
  int value = 0;  // written by lane 0 between two meetings of all lanes
};

class ThreadTeam {
 public:
  ThreadTeam(int lane, int lanes, Meeting& meeting) : lane_(lane), lanes_(lanes), meeting_(meeting) {}

  int rank() const { return lane_; }
  int size() const { return lanes_; }
  void sync() const { meeting_.barrier.arrive_and_wait(); }
  int broadcast(int value) const {
    if (lane_ == 0) meeting_.value = value;
    sync();
    const int said = meeting_.value;
    sync();
    return said;
  }

 private:
  int lane_, lanes_;
  Meeting& meeting_;
};

}  // namespace flexep
