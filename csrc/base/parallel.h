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

/// Runs part(i) for i in [begin, end), one thread each, this one included. Started as a tree, so that the last part
/// does not wait for all the others to be started one by one.
template <class Part>
void run_parts(std::int64_t begin, std::int64_t end, const Part& part) {
  std::vector<std::thread> started;
  try {
    while (end - begin > 1) {
      const std::int64_t middle = begin + ceil_div(end - begin, std::int64_t{2});
      started.emplace_back([&part, middle, end] { run_parts(middle, end, part); });
      end = middle;
    }
  } catch (const std::system_error&) {
    // The process may not start more threads: this one does the parts that are left.
  }
  for (; begin < end; ++begin) part(begin);
  for (std::thread& thread : started) thread.join();
}

/// Calls body(begin, end) over contiguous parts of [0, items), on at most `threads` threads, the caller's included.
/// `bytes` is the memory traffic of all items together. body must not throw.
template <class Body>
void parallel_for(std::int64_t items, std::int64_t bytes, int threads, const Body& body) {
  if (items <= 0) return;
  const std::int64_t wanted = std::min({static_cast<std::int64_t>(threads), bytes / kBytesPerThread, items});
  const std::int64_t parts = std::max<std::int64_t>(1, wanted);
  const std::int64_t step = ceil_div(items, parts);
  run_parts(0, parts, [&](std::int64_t part) {
    const FpScope defaults;
    const std::int64_t begin = part * step, end = std::min(items, begin + step);
    if (begin < end) body(begin, end);
  });
}

}  // namespace flexep
