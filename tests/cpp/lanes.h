// Blocks of warps of threads that run a step of the plan as a grid of CTAs does (plan/block.h).
#pragma once
#include <algorithm>
#include <barrier>
#include <cstdint>
#include <deque>
#include <thread>
#include <vector>

#include "plan/block.h"

namespace lanes {

using Ints = std::vector<int32_t>;
constexpr int32_t kPoison = -77;

struct Shape {
  int blocks, warps, width;
  int lanes() const { return warps * width; }
};
constexpr Shape kOne{1, 1, 1};

/// What the lanes of a warp show each other.
struct WarpMeeting {
  explicit WarpMeeting(int width) : barrier(width) {}
  std::barrier<> barrier;
  int64_t shown[32];
};

struct ThreadBlock {
  Shape shape;
  int block_rank, lane_of_block;
  std::barrier<>* meet;
  WarpMeeting* warp_meet;

  int rank() const { return lane_of_block; }
  int size() const { return shape.lanes(); }
  void sync() const { meet->arrive_and_wait(); }
  int block() const { return block_rank; }
  int blocks() const { return shape.blocks; }
  int warp() const { return lane_of_block / shape.width; }
  int warps() const { return shape.warps; }
  int lane() const { return lane_of_block % shape.width; }
  int width() const { return shape.width; }
  void warp_sync() const { warp_meet->barrier.arrive_and_wait(); }
  uint32_t peers(int32_t key) const {
    return over_lanes<uint32_t>(
        key, [&](uint32_t mask, int lane, int64_t shown) { return mask | (shown == key ? 1u << lane : 0); });
  }
  uint32_t ballot(bool yes) const {
    return over_lanes<uint32_t>(
        yes, [](uint32_t mask, int lane, int64_t shown) { return mask | (shown ? 1u << lane : 0); });
  }
  int64_t warp_sum(int64_t value) const {
    return over_lanes<int64_t>(value, [](int64_t sum, int, int64_t shown) { return sum + shown; });
  }
  int32_t warp_max(int32_t value) const {
    return static_cast<int32_t>(
        over_lanes<int64_t>(value, [](int64_t most, int, int64_t shown) { return std::max(most, shown); }));
  }
  int32_t warp_scan(int32_t value) const {
    return static_cast<int32_t>(over_lanes<int64_t>(
        value, [&](int64_t sum, int other, int64_t shown) { return sum + (other < lane() ? shown : 0); }));
  }
  int32_t warp_get(int32_t value, int from) const {
    warp_meet->shown[lane()] = value;
    warp_sync();
    const auto shown = static_cast<int32_t>(warp_meet->shown[from % width()]);
    warp_sync();
    return shown;
  }

 private:
  template <class T, class Fold>
  T over_lanes(int64_t value, Fold fold) const {
    warp_meet->shown[lane()] = value;
    warp_sync();
    T folded = 0;
    for (int lane = 0; lane < width(); ++lane) folded = fold(folded, lane, warp_meet->shown[lane]);
    warp_sync();
    return folded;
  }
};

/// Runs phase after phase; between two, all threads meet and every block's shared memory is lost.
template <int kPhase, class Step>
void run_phases(const Step& step, const ThreadBlock& team, Ints& shared, std::barrier<>& all) {
  step.template phase<kPhase>(team, shared.data());
  all.arrive_and_wait();
  if constexpr (kPhase + 1 < Step::kPhases) {
    if (team.rank() == 0) std::fill(shared.begin(), shared.end(), kPoison);
    team.sync();
    run_phases<kPhase + 1>(step, team, shared, all);
  }
}

template <class Step>
void run(const Step& step, Shape shape) {
  const auto ints = static_cast<size_t>(step.shared_ints(shape.warps, shape.lanes()));
  if (shape.blocks * shape.lanes() == 1) {
    Ints shared(ints, kPoison);
    return flexep::run_solo(step, shared.data());
  }
  std::vector<Ints> shared(shape.blocks, Ints(ints, kPoison));
  std::deque<std::barrier<>> meets;
  std::deque<WarpMeeting> warps;
  std::barrier<> all(shape.blocks * shape.lanes());
  std::vector<std::jthread> threads;
  for (int block = 0; block < shape.blocks; ++block) {
    meets.emplace_back(shape.lanes());
    for (int lane = 0; lane < shape.lanes(); ++lane) {
      if (lane % shape.width == 0) warps.emplace_back(shape.width);
      const ThreadBlock team{shape, block, lane, &meets.back(), &warps.back()};
      threads.emplace_back([&, team, block] { run_phases<0>(step, team, shared[block], all); });
    }
  }
}

template <class Step>
Ints workspace(const Step& step, Shape shape) {
  return Ints(static_cast<size_t>(step.workspace_ints(shape.blocks)), kPoison);
}

}  // namespace lanes
