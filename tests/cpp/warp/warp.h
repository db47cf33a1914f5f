// A warp on the host, so that device text runs where there is no GPU: its lanes are fibers, which meet at every
// collective. Lanes that do not meet at the same one, in the same line and column, are a failure; so are a mask of
// fewer lanes and a shuffle from a lane that is none.
#pragma once
#include <ucontext.h>

#include <array>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <source_location>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __noinline__

struct Index {
  unsigned x = 0;
};
inline Index threadIdx, blockIdx, gridDim;  // threadIdx: of the lane that runs

namespace warp {

constexpr int kLanes = 32;
using Place = std::source_location;

inline int seed = 0;  // of the world that runs

/// Says what is wrong, and ends the program.
template <class... Values>
[[noreturn]] void fail(const char* format, const Values&... values) {
  std::printf("seed %d: ", seed);
  std::printf(format, values...);
  std::puts("");
  std::fflush(stdout);
  std::_Exit(1);  // from a lane: what is on its stack is lost
}

class Warp {
 public:
  /// Runs body() on every lane until all have ended.
  void run(const std::function<void()>& body) {
    body_ = &body;
    for (int lane = 0; lane < kLanes; ++lane) {
      ucontext_t& fiber = fibers_[lane];
      getcontext(&fiber);
      fiber.uc_stack.ss_sp = &stacks_[lane * kStackBytes];
      fiber.uc_stack.ss_size = kStackBytes;
      fiber.uc_link = &scheduler_;
      makecontext(&fiber, &Warp::run_lane, 0);
    }
    do {
      for (lane_ = 0; lane_ < kLanes; ++lane_) {
        threadIdx.x = kWarp * kLanes + lane_;
        swapcontext(&scheduler_, &fibers_[lane_]);
      }
      for (int lane = 1; lane < kLanes; ++lane) check_alike(lane);
      seen_ = shown_;
    } while (!at_[0].ended);
  }

  int lane() const { return lane_; }
  /// What every lane shows at a collective.
  template <class T>
  std::array<std::uint64_t, kLanes> meet(const T& shown, const Place& place) {
    static_assert(sizeof shown <= sizeof shown_[0]);
    shown_[lane_] = 0;
    memcpy(&shown_[lane_], &shown, sizeof shown);
    at_[lane_] = {false, place};
    swapcontext(&fibers_[lane_], &scheduler_);
    return seen_;
  }

 private:
  static constexpr std::size_t kStackBytes = 64 * 1024;
  static constexpr int kWarp = 2;  // of its CTA

  struct Stop {
    bool ended;
    Place place;
  };

  static void run_lane();
  void check_alike(int lane) const {
    const Stop &first = at_[0], &other = at_[lane];
    if (first.ended != other.ended)
      fail("lanes diverge: lane %d is at line %u, lane %d has ended", first.ended ? lane : 0,
           (first.ended ? other : first).place.line(), first.ended ? 0 : lane);
    if (!first.ended &&
        (first.place.line() != other.place.line() || first.place.column() != other.place.column() ||
         strcmp(first.place.file_name(), other.place.file_name()) != 0))
      fail("lanes diverge: lane 0 is at line %u of %s, lane %d at line %u", first.place.line(),
           first.place.file_name(), lane, other.place.line());
  }

  const std::function<void()>* body_ = nullptr;
  int lane_ = 0;
  ucontext_t scheduler_, fibers_[kLanes];
  std::vector<char> stacks_ = std::vector<char>(kLanes * kStackBytes);
  std::array<std::uint64_t, kLanes> shown_{}, seen_{};
  std::array<Stop, kLanes> at_{};
};
inline Warp the_warp;

inline void Warp::run_lane() {
  (*the_warp.body_)();
  the_warp.at_[the_warp.lane_] = {true, {}};
}

/// What lane `from` shows.
template <class T>
T shuffle(unsigned mask, const T& value, int from, const Place& place) {
  if (mask != 0xffffffffu) fail("line %u: not all lanes are asked", place.line());
  if (from < 0 || from >= kLanes) fail("line %u: a shuffle from lane %d", place.line(), from);
  const std::uint64_t shown = the_warp.meet(value, place)[from];
  T there;
  memcpy(&there, &shown, sizeof there);
  return there;
}

/// Where device text has put vectors of zeros, in any order.
inline std::vector<char*> cleared_vectors;

}  // namespace warp

template <class T>
T __shfl_sync(unsigned mask, T value, int from, const warp::Place& place = warp::Place::current()) {
  return warp::shuffle(mask, value, from, place);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int by, const warp::Place& place = warp::Place::current()) {
  const int lane = warp::the_warp.lane();
  return warp::shuffle(mask, value, lane < by ? lane : lane - by, place);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, int by, const warp::Place& place = warp::Place::current()) {
  const int lane = warp::the_warp.lane();
  return warp::shuffle(mask, value, lane + by < warp::kLanes ? lane + by : lane, place);
}
inline unsigned __ballot_sync(unsigned mask, bool yes, const warp::Place& place = warp::Place::current()) {
  if (mask != 0xffffffffu) warp::fail("line %u: not all lanes are asked", place.line());
  unsigned ballot = 0, bit = 1;
  for (const std::uint64_t shown : warp::the_warp.meet(yes, place)) ballot |= shown ? bit : 0, bit *= 2;
  return ballot;
}
inline int __popc(unsigned bits) { return std::popcount(bits); }
/// The place of the lowest bit, from 1 on; 0: none.
inline int __ffs(int bits) { return __builtin_ffs(bits); }
/// The place of the nth bit from `base` on, n > 0.
inline unsigned __fns(unsigned bits, unsigned base, int n) {
  for (; base < 32; ++base)
    if ((bits >> base & 1) != 0 && --n == 0) return base;
  return ~0u;
}
