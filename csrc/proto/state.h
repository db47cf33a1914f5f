// What a rank remembers of its window between operations. Private: it lies beside the window (on a GPU in device
// memory), no peer sees it, and the operations themselves advance it, so a captured graph passes no epoch.
#pragma once
#include <cstdint>

#include "proto/words.h"

namespace flexep {

/// Followed in memory by `last_used`, [slices][kChannels][ranks]: the epoch in which a line was last written.
struct WindowState {
  Epoch epoch = 0;            // operations begun
  std::uint32_t boards = 0;   // boards published; its parity chooses the board
  std::uint32_t busy = 0;     // 1 while an operation runs: a second one faults
  std::uint32_t stopped = 0;  // 1 once this rank has given up or left, or learnt that a peer gave up
};

}  // namespace flexep
