// Who runs a step of the plan. A step has phases. A phase is run by blocks that never meet (the CTAs of one kernel);
// the next phase begins when all of them are done and sees all that they wrote (the next kernel, or over windows the
// other side of a grid barrier). No step needs its blocks to be resident together, and none spins.
//
// A block is a Team (rank, size, sync: base/team.h) that also knows
//   block(), blocks()         which of how many blocks
//   warp(), warps()           its lanes come in warps of one width, in rank order
//   lane(), width()           which lane of the warp; at most 32, and no fewer than a token has slots
//   warp_sync()               the lanes of a warp meet; earlier writes of each are visible to all
//   peers(key)                lanes of the warp that called with the same key, as bits; all lanes call together
//   ballot(yes)               lanes that called with true
//   warp_sum                  over the lanes of a warp, of values in [0, 2^52)
//   warp_max, warp_scan       likewise; the scan is of lower lanes only
//   warp_get(value, lane)     the value of another lane, modulo the width; all lanes call together
#pragma once
#include <bit>
#include <cstdint>

#include "base/team.h"

namespace flexep {

/// One block of one lane: how the host runs the plan.
struct SoloBlock : Solo {
  static constexpr bool kOneLane = true;
  FLEXEP_HD int block() const { return 0; }
  FLEXEP_HD int blocks() const { return 1; }
  FLEXEP_HD int warp() const { return 0; }
  FLEXEP_HD int warps() const { return 1; }
  FLEXEP_HD int lane() const { return 0; }
  FLEXEP_HD int width() const { return 1; }
  FLEXEP_HD void warp_sync() const {}
  FLEXEP_HD uint32_t peers(int32_t) const { return 1; }
  FLEXEP_HD uint32_t ballot(bool yes) const { return yes; }
  FLEXEP_HD int64_t warp_sum(int64_t value) const { return value; }
  FLEXEP_HD int32_t warp_max(int32_t value) const { return value; }
  FLEXEP_HD int32_t warp_scan(int32_t) const { return 0; }
  FLEXEP_HD int32_t warp_get(int32_t value, int) const { return value; }
};

FLEXEP_HD int count_bits(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __popc(bits);
#else
  return std::popcount(bits);
#endif
}

/// The lowest bit that is set; at least one is.
FLEXEP_HD int lowest_bit(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __ffs(static_cast<int>(bits)) - 1;
#else
  return std::countr_zero(bits);
#endif
}

// A loop whose iterations are independent loads: all of them in flight at once. The host's compiler decides by itself.
#if defined(__CUDACC__)
#define FLEXEP_UNROLL _Pragma("unroll")
#else
#define FLEXEP_UNROLL
#endif

// A loop that mostly runs once or twice: a compiler that does not know it would unroll it, and pay in instructions.
#if defined(__CUDACC__)
#define FLEXEP_ROLLED _Pragma("unroll 1")
#else
#define FLEXEP_ROLLED
#endif

// A loop whose iterations touch nothing of each other's, whatever the compiler can prove.
#if defined(__CUDACC__)
#define FLEXEP_INDEPENDENT
#elif defined(__clang__)
#define FLEXEP_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define FLEXEP_INDEPENDENT _Pragma("GCC ivdep")
#endif

// Stores where `yes`: by a lane that is alone without a branch, which would be guessed wrong half the time. to[at] may
// then be no memory of ours where not.
template <class Team>
FLEXEP_HD void scatter_if(const Team&, bool yes, int32_t* to, int at, int32_t value) {
  if constexpr (requires { Team::kOneLane; }) {
    int32_t nowhere;
    int32_t* const places[] = {&nowhere, to + (yes ? at : 0)};
    *places[yes] = value;
  } else {
    if (yes) to[at] = value;
  }
}

/// Bits of the lanes below `lane`, which is in [0, 32).
FLEXEP_HD uint32_t lanes_below(int lane) { return (1u << lane) - 1; }

/// This lane and the number of lanes, over all blocks: for work whose parts do not touch.
template <class Team>
FLEXEP_HD int64_t grid_rank(const Team& team) {
  return static_cast<int64_t>(team.block()) * team.size() + team.rank();
}
template <class Team>
FLEXEP_HD int64_t grid_size(const Team& team) {
  return static_cast<int64_t>(team.blocks()) * team.size();
}

/// The lanes of a block's warp as a team, for LaneRange.
template <class Team>
struct WarpLanes {
  const Team& team;
  FLEXEP_HD int rank() const { return team.lane(); }
  FLEXEP_HD int size() const { return team.width(); }
};

/// The range of [0, n) that this warp owns: contiguous, so that warp order over all blocks is index order. A block's is
/// the same whatever its warps.
struct WarpRange {
  int begin, end;
  template <class Team>
  FLEXEP_HD WarpRange(const Team& team, int n) {
    const Share block(n, team.block(), team.blocks());
    const Share warp(block.end - block.begin, team.warp(), team.warps());
    begin = block.begin + warp.begin, end = block.begin + warp.end;
  }
};

constexpr int kReadAtOnce = 4;  // batches of a warp

/// values[i], by selects: a GPU keeps in registers only what it need not look for.
template <class Value>
FLEXEP_HD Value nth(const Value (&values)[kReadAtOnce], int i) {
  Value found = values[0];
  FLEXEP_UNROLL
  for (int j = 1; j < kReadAtOnce; ++j)
    if (i == j) found = values[j];
  return found;
}

/// Calls body(value, i, t, k, valid) for the slots i = t * top_k + k of this warp's tokens, a slot a lane, in order. All
/// lanes of the warp call equally often; `valid` is false past the end. value: read(i, t, k), of some batches before the
/// first of their bodies, so that trips to memory are under way together; what read depends on no body of the warp may
/// write for another slot. Past the end it is the default.
template <class Team, class Read, class Body>
FLEXEP_HD void for_warp_slots(const Team& team, int tokens, int top_k, const Read& read, const Body& body) {
  if constexpr (requires { Team::kOneLane; }) {  // the same, of which a compiler makes more
    for (int t = 0; t < tokens; ++t)
      for (int k = 0; k < top_k; ++k) {
        const int64_t i = static_cast<int64_t>(t) * top_k + k;
        body(read(i, t, k), i, t, k, true);
      }
    return;
  }
  const WarpRange mine(team, tokens);
  const int64_t begin = static_cast<int64_t>(mine.begin) * top_k,
                end = static_cast<int64_t>(mine.end) * top_k;
  if (begin == end) return;
  const int whole = team.width() / top_k, rest = team.width() % top_k;
  struct Slot {
    int64_t i;
    int t, k;
  } slot{begin + team.lane(), mine.begin + team.lane() / top_k, team.lane() % top_k};
  const auto go_on = [&](Slot& from) {
    from.i += team.width(), from.t += whole, from.k += rest;
    if (from.k >= top_k) from.k -= top_k, ++from.t;
  };
  for (int64_t at = begin; at < end;) {
    decltype(read(0, 0, 0)) values[kReadAtOnce]{};
    Slot ahead = slot;
    FLEXEP_UNROLL
    for (int j = 0; j < kReadAtOnce; ++j, go_on(ahead))
      if (ahead.i < end) values[j] = read(ahead.i, ahead.t, ahead.k);
    FLEXEP_ROLLED
    for (int j = 0; j < kReadAtOnce && at < end; ++j, at += team.width(), go_on(slot))
      body(nth(values, j), slot.i, slot.t, slot.k, slot.i < end);
  }
}

/// Calls body(value, t, k, valid) for the slots of this warp's tokens, a slot a lane, whole tokens together: lanes
/// [lane - k, lane - k + top_k) hold one. All lanes of the warp call equally often. value: read(t, k), as above.
template <class Team, class Read, class Body>
FLEXEP_HD void for_warp_tokens(const Team& team, int tokens, int top_k, const Read& read, const Body& body) {
  const WarpRange mine(team, tokens);
  const int whole = team.width() / top_k, token = team.lane() / top_k, k = team.lane() % top_k;
  const auto is_slot = [&](int t) { return token < whole && t + token < mine.end; };
  for (int t = mine.begin; t < mine.end;) {
    decltype(read(0, 0)) values[kReadAtOnce]{};
    FLEXEP_UNROLL
    for (int j = 0; j < kReadAtOnce; ++j)
      if (is_slot(t + j * whole)) values[j] = read(t + j * whole + token, k);
    FLEXEP_ROLLED
    for (int j = 0; j < kReadAtOnce && t < mine.end; ++j, t += whole)
      body(nth(values, j), t + token, k, is_slot(t));
  }
}

/// Runs all phases of a step by one lane. `shared`: the step's shared_ints(1, 1).
template <class Step, int kPhase = 0>
void run_solo(const Step& step, int32_t* shared) {
  const Step mine = step;  // which nothing that is written can alias
  mine.template phase<kPhase>(SoloBlock{}, shared);
  if constexpr (kPhase + 1 < Step::kPhases) run_solo<Step, kPhase + 1>(step, shared);
}

}  // namespace flexep
