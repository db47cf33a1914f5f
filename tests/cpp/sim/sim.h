// Mem and Team over the simulated memory: every call is a point at which another lane may go on.
#pragma once
#include <cmath>
#include <limits>

#include "memory.h"
#include "proto/wait.h"
#include "scheduler.h"

namespace flexep::sim {

/// All lanes of a run meet at a Gate again and again; the last to come opens it.
class Gate {
 public:
  Gate(Scheduler& scheduler, std::vector<int> lanes) : scheduler_(scheduler), lanes_(std::move(lanes)) {}
  /// `open` is called once a meeting, when all have come.
  template <class Open>
  void pass(const Open& open) {
    if (++come_ < static_cast<int>(lanes_.size())) return scheduler_.block();
    come_ = 0;
    open();
    for (int lane : lanes_)
      if (lane != scheduler_.current()) scheduler_.wake(lane);
    scheduler_.yield();
  }
  const std::vector<int>& lanes() const { return lanes_; }

 private:
  Scheduler& scheduler_;
  std::vector<int> lanes_;
  int come_ = 0;
};

struct Sim;

/// One lane's Mem. The relaxed calls are no part of what Mem offers: mutants use them.
class SimMem {
 public:
  SimMem(Sim& sim, int rank, int lane) : sim_(sim), rank_(rank), lane_(lane) {}

  void put(int to, std::size_t at, const void* from, std::size_t bytes);
  void* target(int to, std::size_t at, std::size_t bytes);
  const void* view(int from, std::size_t at, std::size_t bytes);
  void drain();
  void post(int to, std::size_t at, Signal signal) { post(to, at, signal, Publish::all); }
  void put_then_post(int to, std::size_t at, const void* from, std::size_t bytes, std::size_t word_at,
                     Signal signal);
  Signal load(std::size_t at) { return load(at, true); }
  Idle idle(std::size_t at, Signal seen, Clock& clock);
  bool stop_once();

  void post(int to, std::size_t at, Signal signal, Publish publish);
  Signal load(std::size_t at, bool acquire);

 private:
  bool is_fresh(std::size_t at) const;

  Sim& sim_;
  int rank_, lane_;
};

class SimTeam {
 public:
  struct Shared {
    Gate gate;
    int value = 0;
    std::vector<int> said = {};
  };
  SimTeam(Sim& sim, Shared& shared, int lane);
  int rank() const { return rank_; }
  int size() const { return static_cast<int>(shared_.gate.lanes().size()); }
  void sync();
  int broadcast(int value) {
    if (rank_ == 0) shared_.value = value;
    sync();
    return shared_.said[rank_];
  }

 private:
  Sim& sim_;
  Shared& shared_;
  int lane_, rank_;
};

/// One run: who waits for what, and the time that passes only when nobody can go on.
struct Sim {
  struct Sleeper {
    int lane, rank;
    std::int64_t until;
    bool expired = false;
  };
  static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

  Sim(const WindowLayout& window, int lanes, std::uint64_t seed)
      : layout(window), random(seed), scheduler(random), memory(window, lanes, random) {
    memory.wrong = [this](const std::string& what) { scheduler.fail(what); };
    scheduler.stuck = [this] { return expire_next(); };
    stopped.resize(window.shape.topology.ranks);
    stop_messages.resize(window.shape.topology.ranks);
  }

  /// Everybody who sleeps at this rank's words looks again.
  void wake_sleepers(int rank) {
    for (Sleeper& sleeper : sleepers)
      if (sleeper.rank == rank) scheduler.wake(sleeper.lane);
  }
  bool expire_next() {
    Sleeper* next = nullptr;
    for (Sleeper& sleeper : sleepers)
      if (sleeper.until != kNever && (!next || sleeper.until < next->until)) next = &sleeper;
    if (!next) return false;
    now = std::max(now, next->until);
    next->expired = true;
    scheduler.wake(next->lane);
    return true;
  }
  void kill_rank(int rank) {
    for (std::size_t lane = 0; lane < rank_of_lane.size(); ++lane)
      if (rank_of_lane[lane] == rank) scheduler.kill(static_cast<int>(lane));
    std::erase_if(sleepers, [rank](const Sleeper& sleeper) { return sleeper.rank == rank; });
  }

  const WindowLayout& layout;
  Random random;
  Scheduler scheduler;
  Memory memory;
  std::vector<int> rank_of_lane;
  std::vector<Sleeper> sleepers;
  std::int64_t now = 1;
  std::vector<char> stopped;
  std::vector<int> stop_messages;
  int dies_telling = -1, tells = 0;  // this rank dies after it has told so many that it gives up
};

inline void SimMem::put(int to, std::size_t at, const void* from, std::size_t bytes) {
  sim_.memory.put(lane_, to, at, from, bytes);
  sim_.scheduler.yield();
}
inline void* SimMem::target(int to, std::size_t at, std::size_t bytes) {
  return sim_.memory.target(lane_, to, at, bytes);
}
inline const void* SimMem::view(int from, std::size_t at, std::size_t bytes) {
  const void* const seen = sim_.memory.view(lane_, from, at, bytes);
  sim_.scheduler.yield();
  return seen;
}
inline void SimMem::drain() {
  sim_.memory.drain(lane_);
  sim_.scheduler.yield();
}
inline void SimMem::post(int to, std::size_t at, Signal signal, Publish publish) {
  sim_.scheduler.yield();
  sim_.memory.post(lane_, rank_, to, at, signal, publish);
  sim_.wake_sleepers(to);
  sim_.scheduler.yield();
}
inline void SimMem::put_then_post(int to, std::size_t at, const void* from, std::size_t bytes,
                                  std::size_t word_at, Signal signal) {
  sim_.scheduler.yield();
  if (sim_.dies_telling == rank_ && sim_.stop_messages[rank_]++ == sim_.tells) {
    sim_.kill_rank(rank_);
    sim_.scheduler.yield();
  }
  sim_.memory.message(lane_, rank_, to, at, from, bytes, word_at, signal);
  sim_.wake_sleepers(to);
  sim_.scheduler.yield();
}
inline Signal SimMem::load(std::size_t at, bool acquire) {
  sim_.scheduler.yield();
  return sim_.memory.load(lane_, rank_, at, acquire);
}
inline bool SimMem::is_fresh(std::size_t at) const {
  for (int peer = 0; peer < sim_.layout.shape.topology.ranks; ++peer)
    if (!sim_.memory.is_fresh(lane_, rank_, sim_.layout.word(Word::stopped, peer))) return false;
  return sim_.memory.is_fresh(lane_, rank_, at);
}
/// Sleeps if this wait has looked around and the lane has read the newest of all that can end it: another look would
/// show it nothing.
inline Idle SimMem::idle(std::size_t at, Signal, Clock& clock) {
  if (clock.began == 0) clock.began = sim_.now;
  if (clock.looks == 0 || !is_fresh(at)) {
    sim_.scheduler.yield();
    if (sim_.random.one_in(2)) return Idle::again;
    ++clock.looks;
    return Idle::look_around;
  }
  const std::int64_t until =
      std::isinf(clock.seconds) ? Sim::kNever : clock.began + static_cast<std::int64_t>(clock.seconds * 1e9);
  sim_.sleepers.push_back({lane_, rank_, until});
  sim_.scheduler.block();
  for (std::size_t i = 0; i < sim_.sleepers.size(); ++i) {
    if (sim_.sleepers[i].lane != lane_) continue;
    const bool expired = sim_.sleepers[i].expired;
    sim_.sleepers[i] = sim_.sleepers.back();
    sim_.sleepers.pop_back();
    return expired ? Idle::expired : Idle::look_around;
  }
  return Idle::look_around;
}
inline bool SimMem::stop_once() {
  const bool first = !sim_.stopped[rank_];
  sim_.stopped[rank_] = 1;
  return first;
}

inline SimTeam::SimTeam(Sim& sim, Shared& shared, int lane) : sim_(sim), shared_(shared), lane_(lane) {
  const auto& lanes = shared.gate.lanes();
  rank_ = static_cast<int>(std::find(lanes.begin(), lanes.end(), lane) - lanes.begin());
  shared.said.resize(lanes.size());
}
inline void SimTeam::sync() {
  const int leader = shared_.gate.lanes()[0];
  sim_.memory.come(lane_, leader);
  shared_.gate.pass([&] {
    for (int lane : shared_.gate.lanes()) sim_.memory.go(lane, leader);
    std::fill(shared_.said.begin(), shared_.said.end(), shared_.value);
  });
}

}  // namespace flexep::sim
