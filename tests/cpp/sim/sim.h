// Mem and Team over the simulated memory: every call is a point at which another lane may go on.
#pragma once
#include <cmath>
#include <cstring>
#include <deque>
#include <limits>
#include <utility>

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

/// The one lane of a team that says or hears something for others.
class SimSolo {
 public:
  SimSolo(Sim& sim, int lane) : sim_(sim), lane_(lane) {}
  int rank() const { return 0; }
  int size() const { return 1; }
  void sync() const;
  int broadcast(int value) const {
    sync();
    return value;
  }

 private:
  Sim& sim_;
  int lane_;
};

/// What the lanes of a SplitCrew tell each other: counts with a history, of which a lane sees any value from the last one
/// that it saw on.
class SimCounts {
 public:
  SimCounts(Sim& sim, int first_lane, int lanes)
      : sim_(sim), first_lane_(first_lane), counts_(1 + lanes), lookers_(lanes) {
    for (Looker& looker : lookers_) looker.seen.resize(counts_.size());
  }

  // `publish`: nothing, for mutants whose counts carry no more than their value.
  void set(int number, int lane, int value, Publish publish);
  int get(int number, int lane, Publish publish);
  void pause(int lane);

 private:
  struct Told {
    int value;
    Memory::Handover handover;
  };
  struct Count {
    std::vector<Told> history;
  };
  struct Looker {
    std::vector<int> seen;  // of each count, how much of its history
    bool fresh = false;     // sees the newest
    std::uint64_t version = 0;
    bool sleeps = false;
  };

  Sim& sim_;
  int first_lane_;
  std::vector<Count> counts_;  // what is granted, then what each mover has moved
  std::vector<Looker> lookers_;
  std::uint64_t version_ = 1;
};

/// One lane's view of them.
template <Publish kSet, Publish kGet>
class SimProgress {
 public:
  SimProgress(SimCounts& counts, int lane) : counts_(counts), lane_(lane) {}
  void set_granted(int steps) { counts_.set(0, lane_, steps, kSet); }
  int granted() { return counts_.get(0, lane_, kGet); }
  void set_moved(int mover, int steps) { counts_.set(1 + mover, lane_, steps, kSet); }
  int moved(int mover) { return counts_.get(1 + mover, lane_, kGet); }
  void pause() { counts_.pause(lane_); }

 private:
  SimCounts& counts_;
  int lane_;
};

/// The Mem of a lane that moves: steps may be done long after they were begun.
template <class Mem>
class SimMover : public Mem {
 public:
  SimMover(Sim& sim, int rank, int lane) : Mem(sim, rank, lane), sim_(sim), lane_(lane) {}
  void begin(int step) { begun_ = step; }
  int done();
  void finish();

 private:
  Sim& sim_;
  int lane_, begun_ = 0, done_ = 0;
};

/// A ring of stages whose copies happen at some time between load and wait, and between store and drain.
class SimRing {
 public:
  SimRing(Sim& sim, int lane, int stages, int stage_bytes, int row_bytes)
      : sim_(sim), lane_(lane), stages_(stages), stage_bytes_(stage_bytes), row_bytes_(row_bytes) {}

  int stages() const { return stages_; }
  int stage_bytes() const { return stage_bytes_; }
  bool leads() const { return true; }
  int held() const { return loads_ - passed(); }
  int next() const { return loads_ % stages_; }
  int oldest() const { return passed() % stages_; }
  int passed() const { return static_cast<int>(stores_.size()); }

  void acquire() {
    if (loads_ >= stages_) store_until(loads_ - stages_ + 1);
  }
  void load(const void* from, int bytes) {
    pieces_.push_back({static_cast<const char*>(from), std::vector<char>(bytes)});
    ++loads_;
    if (one_in(2)) read_until(loads_);
  }
  const char* wait() {
    read_until(passed() + 1);
    return pieces_[passed()].bytes.data();
  }
  void store_each(void* to, int bytes) {
    stores_.push_back({static_cast<char*>(to), bytes});
    if (one_in(4)) store_until(passed());
  }
  void skip() { store_each(nullptr, 0); }
  void drain(int pending = 0);

 private:
  struct Piece {
    const char* from;
    std::vector<char> bytes;
  };
  struct Store {
    char* to;
    int bytes;
  };

  bool one_in(int n);
  void read_until(int count);
  void store_until(int count) {
    for (; stored_ < count; ++stored_) {
      const Store& store = stores_[stored_];
      if (store.to) std::memcpy(store.to, pieces_[stored_].bytes.data(), store.bytes), bytes_ += store.bytes;
    }
  }

  Sim& sim_;
  int lane_, stages_, stage_bytes_, row_bytes_;
  int loads_ = 0, read_ = 0, stored_ = 0, bytes_ = 0, drained_ = 0;  // rows drained
  std::deque<Piece> pieces_;
  std::deque<Store> stores_;
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

inline void SimSolo::sync() const { sim_.memory.end_views(lane_); }

inline void SimCounts::set(int number, int lane, int value, Publish publish) {
  sim_.scheduler.yield();
  Memory::Handover handover;
  if (publish == Publish::all) handover = sim_.memory.hand_over(lane);
  counts_[number].history.push_back({value, std::move(handover)});
  ++version_;
  for (std::size_t i = 0; i < lookers_.size(); ++i)
    if (std::exchange(lookers_[i].sleeps, false)) sim_.scheduler.wake(first_lane_ + static_cast<int>(i));
}
/// The reader of a count takes over what was drained before it was set: only a poster reads those that movers set.
inline int SimCounts::get(int number, int lane, Publish publish) {
  sim_.scheduler.yield();
  Looker& looker = lookers_[lane - first_lane_];
  if (sim_.random.one_in(8)) looker.fresh = false;
  const std::vector<Told>& history = counts_[number].history;
  int& seen = looker.seen[number];
  const int newest = static_cast<int>(history.size());
  const int now = looker.fresh ? newest : seen + sim_.random.below(newest - seen + 1);
  if (publish == Publish::all)
    for (int i = seen; i < now && !history[i].handover.knows.empty(); ++i)
      sim_.memory.take_over(lane, history[i].handover);
  seen = now;
  return now == 0 ? 0 : history[now - 1].value;
}
/// Sleeps once a whole look at what is newest was in vain.
inline void SimCounts::pause(int lane) {
  Looker& looker = lookers_[lane - first_lane_];
  if (looker.fresh && looker.version == version_) {
    looker.sleeps = true;
    sim_.scheduler.block();
  }
  looker.fresh = true;
  looker.version = version_;
}

inline bool SimRing::one_in(int n) { return sim_.random.one_in(n); }
/// In order: the last piece of a row ends its view.
inline void SimRing::read_until(int count) {
  for (; read_ < count; ++read_) {
    sim_.scheduler.yield();
    Piece& piece = pieces_[read_];
    std::memcpy(piece.bytes.data(), piece.from, piece.bytes.size());
    sim_.memory.end_view(lane_, piece.from + piece.bytes.size());
  }
}
inline void SimRing::drain(int pending) {
  store_until(std::max(stored_, passed() - pending));
  const int rows = bytes_ / row_bytes_;
  sim_.memory.drain_first(lane_, rows - std::exchange(drained_, rows));
  sim_.scheduler.yield();
}

template <class Mem>
int SimMover<Mem>::done() {
  if (sim_.random.one_in(3)) finish();
  return done_;
}
template <class Mem>
void SimMover<Mem>::finish() {
  Mem::drain();
  sim_.memory.end_views(lane_);
  done_ = begun_;
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
