// The scenarios of the simulator on real threads over real windows: `protocol_threads SEEDS PLANT`. Under TSan a missing
// order is a report; under ASan a row outside its window is. PLANT is "none" or what is missing.
#include <atomic>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "mem/host.h"
#include "mem/host_team.h"
#include "sim/judge.h"

namespace {

using namespace flexep;
using namespace flexep::sim;

class RelaxedMem : public HostMem {
 public:
  RelaxedMem(char* const* windows, const Topology& topology, int rank, WindowState& state)
      : HostMem(windows, topology, rank, state), to_(windows) {}
  void post(int to, std::size_t at, Signal signal) {
    std::atomic_ref<Signal>(*reinterpret_cast<Signal*>(to_[to] + at))
        .store(signal, std::memory_order_relaxed);
  }

 private:
  char* const* to_;
};
struct NoSync : ThreadTeam {
  using ThreadTeam::ThreadTeam;
  void sync() const {}
};

/// What the lanes of a SplitCrew tell each other. `kOrder`: relaxed in a mutant.
template <std::memory_order kSet>
struct ThreadProgress {
  std::atomic<int> steps{0}, done[8] = {};

  void set_granted(int n) { steps.store(n, kSet); }
  int granted() const { return steps.load(std::memory_order_acquire); }
  void set_moved(int mover, int n) { done[mover].store(n, kSet); }
  int moved(int mover) const { return done[mover].load(std::memory_order_acquire); }
  void pause() const { std::this_thread::yield(); }
};

/// Reports every other step late.
template <class Mem>
struct LateMover {
  Mem& mem;
  int begun = 0, reported = 0;

  void begin(int step) { begun = step; }
  int done() {
    if (begun % 2 == 0) finish();
    return reported;
  }
  void finish() { mem.drain(), reported = begun; }
  void put(int to, std::size_t at, const void* from, std::size_t bytes) { mem.put(to, at, from, bytes); }
  void* target(int to, std::size_t at, std::size_t bytes) { return mem.target(to, at, bytes); }
  const void* view(int from, std::size_t at, std::size_t bytes) { return mem.view(from, at, bytes); }
};

/// The crews of one lane: every operation that moves rows has one, with counts of its own.
template <class Mem, std::memory_order kSet>
struct LaneCrews {
  const World& world;
  Mem& mem;
  std::vector<ThreadProgress<kSet>>& progress;  // of the team, by crew
  int lane;                                     // of the team
  int crews = 0;

  template <class Team, class Use>
  Status operator()(Exchange<Mem, Team>& exchange, const Use& use) {
    if (!world.split) {
      TeamCrew crew(exchange);
      return use(crew);
    }
    SoloTeam solo;
    Exchange<Mem, SoloTeam> alone(mem, solo, exchange.layout(), exchange.operation());
    LateMover<Mem> mover{mem};
    SplitCrew crew(actor_of(lane), alone, mover, mover_lane(lane, world.lanes), progress[crews++]);
    const Status status = use(crew);
    crew.finish();
    return status;
  }
  template <class Exchange, class Use>
  Status sends(Exchange& exchange, const Use& use) {
    return (*this)(exchange, use);
  }
  template <class Exchange, class Check, class Use>
  Status places(Exchange& exchange, const Check& check, const Use& use) {
    return (*this)(exchange, [&](auto& crew) { return use(crew, check); });
  }
};

struct Free {
  void operator()(char* memory) const { std::free(memory); }
};

template <class Mem, class Team, std::memory_order kSet = std::memory_order_release>
std::string run(const Scenario& scenario, std::uint64_t seed) {
  const World world(scenario, seed);
  const int R = world.topology().ranks, per_rank = world.teams() * world.lanes;
  std::vector<std::unique_ptr<char, Free>> memory;
  std::vector<char*> windows;
  std::vector<WindowState> states(R);
  std::vector<RankState> ranks;
  std::vector<std::unique_ptr<std::barrier<>>> meetings;
  std::vector<std::unique_ptr<Meeting>> teams;
  for (int rank = 0; rank < R; ++rank) {
    memory.emplace_back(static_cast<char*>(std::aligned_alloc(WindowLayout::kAlign, world.layout.bytes)));
    windows.push_back(memory.back().get());
    std::memset(windows.back(), 0, world.layout.bytes);
    ranks.emplace_back(world, rank);
    meetings.push_back(std::make_unique<std::barrier<>>(per_rank));
    for (int team = 0; team < world.teams(); ++team) teams.push_back(std::make_unique<Meeting>(world.lanes));
  }
  // Of each team, for each of its crews.
  std::vector<std::vector<ThreadProgress<kSet>>> progress(teams.size());
  for (auto& of_team : progress) of_team = std::vector<ThreadProgress<kSet>>(world.epochs);
  std::atomic<const char*> failure = nullptr;
  const auto wrong = [&](const char* what) { failure = what; };
  std::vector<std::thread> threads;
  for (int lane = 0; lane < R * per_rank; ++lane)
    threads.emplace_back([&, lane] {
      const int rank = lane / per_rank;
      Mem mem(windows.data(), world.topology(), rank, states[rank]);
      Team team(lane % world.lanes, world.lanes, *teams[lane / world.lanes]);
      const auto meet = [&] { meetings[rank]->arrive_and_wait(); };
      const int number = lane / world.lanes;
      LaneCrews<Mem, kSet> crews{world, mem, progress[number], lane % world.lanes};
      run_lane(world, rank, number % world.teams(), mem, team, crews, meet, ranks[rank], wrong);
    });
  for (std::thread& thread : threads) thread.join();
  return failure ? failure.load() : judge(world, ranks);
}

bool runs_here(Fate fate) { return fate != Fate::one_killed && fate != Fate::dies_telling; }

}  // namespace

int main(int argc, char** argv) {
  const int seeds = argc > 1 ? std::atoi(argv[1]) : 10;
  const std::string plant = argc > 2 ? argv[2] : "none";
  const auto play = plant == "missing release"     ? run<RelaxedMem, ThreadTeam>
                    : plant == "missing team sync" ? run<HostMem, NoSync>
                    : plant == "missing release of a count"
                        ? run<HostMem, ThreadTeam, std::memory_order_relaxed>
                        : run<HostMem, ThreadTeam>;
  int failures = 0;
  for (const Scenario& scenario : kScenarios) {
    if (!runs_here(scenario.fate)) continue;
    // A wait that must expire takes its second.
    const int worlds = scenario.fate == Fate::one_absent ? 2 : seeds;
    for (int seed = 0; seed < worlds; ++seed) {
      const std::string failure = play(scenario, seed);
      if (failure.empty()) continue;
      std::printf("%s, seed %d: %s\n", scenario.name, seed, failure.c_str());
      ++failures;
    }
    std::printf("%s: %d worlds\n", scenario.name, worlds);
  }
  return failures != 0;
}
