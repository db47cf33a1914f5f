// Threads for one call: started here, joined before returning. No pool, so nothing is lost across fork and
// nothing runs when no call is in flight.
#pragma once
#include <algorithm>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

#include "base/fp_scope.h"
#include "base/math.h"

namespace flexep {

/// Below this many bytes of work per thread, starting a thread (some tens of microseconds) costs more than it
/// saves.
constexpr std::int64_t kBytesPerThread = 1 << 20;

/// Calls body(begin, end) over contiguous parts of [0, items), on at most `threads` threads, the caller's
/// included. `bytes` is the memory traffic of all items together. body must not throw.
template <class Body>
void parallel_for(std::int64_t items, std::int64_t bytes, int threads, const Body& body) {
  if (items <= 0) return;
  const std::int64_t parts = std::max<std::int64_t>(
      1, std::min({static_cast<std::int64_t>(threads), bytes / kBytesPerThread, items}));
  const std::int64_t step = ceil_div(items, parts);
  const auto run = [&](std::int64_t part) {
    const FpScope defaults;
    const std::int64_t begin = part * step, end = std::min(items, begin + step);
    if (begin < end) body(begin, end);
  };
  std::vector<std::thread> started;
  started.reserve(parts - 1);
  std::int64_t next = 1;
  try {
    for (; next < parts; ++next) started.emplace_back(run, next);
  } catch (const std::system_error&) {
    // The process may not start more threads: this one does the parts that are left.
  }
  run(0);
  for (std::int64_t part = next; part < parts; ++part) run(part);
  for (std::thread& thread : started) thread.join();
}

}  // namespace flexep
