// The handshake in the simulator: `protocol_sim SEEDS MUTANT [SCENARIO]` runs scenarios under seeds 0 .. SEEDS-1 and prints
// a table. MUTANT is "none" or a name of kMutants; other mutants are patches of the headers that this is compiled with.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "mem/ring_mover.h"
#include "sim/judge.h"
#include "sim/sim.h"

namespace {

using namespace flexep;
using namespace flexep::sim;

/// A post that publishes nothing.
struct NoRelease : SimMem {
  using SimMem::SimMem;
  void post(int to, std::size_t at, Signal signal) { SimMem::post(to, at, signal, Publish::nothing); }
};
/// A load that teaches nothing.
struct NoAcquire : SimMem {
  using SimMem::SimMem;
  Signal load(std::size_t at) { return SimMem::load(at, false); }
};
struct NoDrain : SimMem {
  using SimMem::SimMem;
  void drain() {}
};
struct NoSync : SimTeam {
  using SimTeam::SimTeam;
  void sync() {}
};

struct Result {
  std::string failure;
  std::int64_t stale;
};

constexpr Publish kAll = Publish::all, kNothing = Publish::nothing;

using Counts = std::map<std::pair<int, int>, SimCounts>;  // by team and crew

/// The crews of one lane: every operation that moves rows has one, with counts of its own.
template <class Mem, class Progress>
struct LaneCrews {
  const World& world;
  Sim& sim;
  Counts& counts;
  int rank, lane;
  int crews = 0;

  template <class Exchange, class Use>
  Status operator()(Exchange& exchange, const Use& use) {
    if (!world.split) return with_team(exchange, use);
    SimMover<Mem> mover(sim, rank, lane);
    return with_mover(exchange, mover, use);
  }
  template <class Exchange, class Use>
  Status sends(Exchange& exchange, const Use& use) {
    if (!world.split || !world.rings) return (*this)(exchange, use);
    RingMover mover(Mem(sim, rank, lane), ring(), kRowBytes, Until::stored, StoreEach{});
    return with_mover(exchange, mover, use);
  }
  template <class Exchange, class Check, class Use>
  Status places(Exchange& exchange, const Check& check, const Use& use) {
    if (!world.split || !world.rings) return (*this)(exchange, [&](auto& crew) { return use(crew, check); });
    RingMover mover(Mem(sim, rank, lane), ring(), kRowBytes, Until::read, CheckEach<Check>{check});
    const MoveRows<decltype(mover)> rows{mover};
    return with_mover(exchange, mover, [&](auto& crew) { return use(crew, rows); });
  }

 private:
  SimRing ring() const { return {sim, lane, world.stages, world.stage_bytes, kRowBytes}; }
  template <class Exchange, class Use>
  Status with_team(Exchange& exchange, const Use& use) {
    TeamCrew crew(exchange);
    return use(crew);
  }
  template <class Team, class Mover, class Use>
  Status with_mover(Exchange<Mem, Team>& exchange, Mover& mover, const Use& use) {
    const int number = lane / world.lanes, here = lane % world.lanes;
    SimCounts& told = counts.try_emplace({number, crews++}, sim, lane - here, world.lanes).first->second;
    SimSolo solo(sim, lane);
    Exchange<Mem, SimSolo> alone(exchange.mem(), solo, exchange.layout(), exchange.operation());
    Progress progress(told, lane);
    SplitCrew crew(actor_of(here), alone, mover, mover_lane(here, world.lanes), progress);
    const Status status = use(crew);
    crew.finish();
    return status;
  }
};

template <class Mem, class Team, class Progress = SimProgress<kAll, kAll>>
Result run(const Scenario& scenario, std::uint64_t seed) {
  const World world(scenario, seed);
  const int R = world.topology().ranks, per_rank = world.teams() * world.lanes;
  Sim sim(world.layout, R * per_rank, seed);
  std::vector<RankState> ranks;
  std::vector<Gate> meetings;
  std::vector<SimTeam::Shared> teams;
  Counts counts;
  for (int rank = 0; rank < R; ++rank) {
    ranks.emplace_back(world, rank);
    std::vector<int> of_rank;
    for (int team = 0; team < world.teams(); ++team) {
      std::vector<int> of_team;
      for (int i = 0; i < world.lanes; ++i) of_team.push_back(static_cast<int>(sim.rank_of_lane.size()) + i);
      sim.rank_of_lane.insert(sim.rank_of_lane.end(), world.lanes, rank);
      of_rank.insert(of_rank.end(), of_team.begin(), of_team.end());
      teams.push_back({Gate(sim.scheduler, of_team)});
    }
    meetings.emplace_back(sim.scheduler, of_rank);
  }
  const auto wrong = [&](const char* what) { sim.scheduler.fail(what); };
  for (int lane = 0; lane < R * per_rank; ++lane)
    sim.scheduler.spawn([&, lane] {
      const int rank = lane / per_rank;
      Mem mem(sim, rank, lane);
      const int number = lane / world.lanes;
      Team team(sim, teams[number], lane);
      LaneCrews<Mem, Progress> crews{world, sim, counts, rank, lane};
      const auto meet = [&] { meetings[rank].pass([&] { sim.memory.meet(meetings[rank].lanes()); }); };
      run_lane(world, rank, number % world.teams(), mem, team, crews, meet, ranks[rank], wrong);
    });
  if (scenario.fate == Fate::one_killed)
    sim.scheduler.ring_at(sim.random.below(400 * R), [&] { sim.kill_rank(world.odd_rank); });
  if (scenario.fate == Fate::dies_telling) {
    sim.dies_telling = world.impatient_rank;
    sim.tells = (world.impatient_rank + 1) % R == world.odd_rank ? 3 : 2;  // itself, and one who lives
  }
  std::string failure = sim.scheduler.run();
  if (failure.empty()) failure = judge(world, ranks);
  if (failure.empty() && sim.memory.ambiguous > 0) failure = "a read raced";
  return {failure, sim.memory.stale};
}

using Run = Result (*)(const Scenario&, std::uint64_t);
struct Mutant {
  const char* name;
  Run run;
};
constexpr Mutant kMutants[] = {
    {"none", run<SimMem, SimTeam>},
    {"missing release", run<NoRelease, SimTeam>},
    {"missing acquire", run<NoAcquire, SimTeam>},
    {"missing drain", run<NoDrain, SimTeam>},
    {"missing team sync", run<SimMem, NoSync>},
    {"missing release of a count", run<SimMem, SimTeam, SimProgress<kNothing, kAll>>},
    {"missing acquire of a count", run<SimMem, SimTeam, SimProgress<kAll, kNothing>>},
};

/// Runs a scenario under many seeds and prints its row of the table.
void tabulate(const Scenario& scenario, int seeds, Run run) {
  int failures = 0;
  std::int64_t stale = 0;
  std::map<std::string, int> names;
  for (int seed = 0; seed < seeds; ++seed) {
    const Result result = run(scenario, seed);
    stale += result.stale;
    if (!result.failure.empty()) ++failures, ++names[result.failure];
  }
  std::printf("%s | %d | %d | %lld | ", scenario.name, seeds, failures, static_cast<long long>(stale));
  for (const auto& [name, times] : names) std::printf("%s: %d; ", name.c_str(), times);
  std::puts("");
}

}  // namespace

int main(int argc, char** argv) {
  const int seeds = argc > 1 ? std::atoi(argv[1]) : 0;
  const std::string mutant = argc > 2 ? argv[2] : "none", only = argc > 3 ? argv[3] : "";
  Run run = nullptr;
  for (const Mutant& known : kMutants)
    if (known.name == mutant) run = known.run;
  if (!run || seeds < 1) return std::puts("protocol_sim SEEDS MUTANT [SCENARIO]"), 2;
  std::puts("scenario | seeds | failures | stale loads | what failed");
  for (const Scenario& scenario : kScenarios)
    if (only.empty() || only == scenario.name) tabulate(scenario, seeds, run);
}
