#include "kernels/device_exec.h"

#include <algorithm>
#include <cstring>

#include "base/cuda_check.h"
#include "kernels/device_crews.cuh"
#include "kernels/device_part.cuh"

namespace flexep {
namespace {

constexpr int kTeamWarps = 8;  // of a CTA that is one team

template <class Args, int kRanks>
struct Launch {
  LaunchedWorld world;
  int op;
  CrewPlan crews;  // of an operation that moves rows
  Args args[kRanks];
};

template <class Teams, int kRanks>
__global__ void __launch_bounds__(kTeamWarps * 32)
    run_teams(const __grid_constant__ Launch<typename Teams::Args, kRanks> launch) {
  __shared__ int said;
  __shared__ CtaTables tables;
  __shared__ typename Teams::Args args;
  const WindowShape& shape = launch.world.layout.shape;
  const CtaOfRank cta = CtaOfRank::of_grid(Teams::ctas(shape));
  if (threadIdx.x == 0) args = launch.args[cta.hosted];
  CtaPart part(launch.world, tables, cta, Teams::slice(cta.number));
  part.run(launch.op, Teams::kPublishes, [&] { return play<Teams>(part, launch.op, &said, args); });
}

template <class Crews, int kRanks>
__global__ void __launch_bounds__(Crews::kMaxThreads, 1)
    run_crews(const __grid_constant__ Launch<typename Crews::Args, kRanks> launch) {
  extern __shared__ __align__(128) char shared[];
  __shared__ CrewCounts counts[CrewPlan::kMaxRoles];
  __shared__ CtaTables tables;
  __shared__ typename Crews::Args args;
  __shared__ Crews crews;
  static_assert(
      CrewPlan::kSharedBytes + sizeof counts + sizeof tables + sizeof args + sizeof crews <= 227 * 1024,
      "what a CTA of sm_90 may have");
  const CtaOfRank cta = CtaOfRank::of_grid(launch.world.layout.shape.slices);
  if (threadIdx.x == 0) args = launch.args[cta.hosted];
  CtaPart part(launch.world, tables, cta, cta.number);
  if (threadIdx.x < CrewPlan::kMaxRoles) counts[threadIdx.x].clear();
  crews.begin();
  // Both are so for everybody: beginning meets.
  part.run(launch.op, false, [&] {
    const bool ahead = Crews::kDelivers && sends_ahead(part.layout());
    const Operation operation = ahead ? part.operation_ahead(launch.op) : part.operation(launch.op);
    CtaCrews crew(launch.crews, part.mem(), part.layout(), operation, counts, shared);
    const Moved moved = crews.run(crew, args, part.layout().shape.topology.ranks);
    if (ahead) part.heed(launch.op);
    return moved;
  });
}

/// One warp for each hosted rank.
__global__ void leave_windows(const __grid_constant__ WindowLayout layout, int first_rank,
                              char* const* windows, DeviceState* states) {
  const int hosted = static_cast<int>(blockIdx.x), rank = first_rank + hosted;
  const Topology& topology = layout.shape.topology;
  WarpMem mem(windows, topology, rank, states[hosted]);
  if (!mem.stop_once()) return;
  for (int to = 0; to < topology.ranks; ++to) mem.post(to, layout.word(Word::stopped, rank), kLeft);
}

/// How many movers a role has in a CTA, and of each one's ring the stages and the bytes of a stage at most; no stages:
/// ordinary loads and stores. A mover is a warp, or so many.
struct Movers {
  int count, stages, stage_bytes, warps = 1;
};
// Measured: docs/decisions/crews.md. They change no bits.
constexpr Movers kPlaceMovers{4, 3, 14336};      // rows that arrive
constexpr Movers kNarrowMovers{8, 3, 7168};      // and are narrow
constexpr Movers kPadMovers{2, 0, 0};            // rows that nothing fills, where none are offered
constexpr Movers kOfferMovers{6, 0, 0};          // rows that are offered
constexpr Movers kRelayMovers{2, 8, 3584};       // and those that a relay offers again
constexpr Movers kPushMovers{2, 3, 14336};       // partial sums that only travel
constexpr Movers kNarrowPushMovers{4, 4, 7168};  // and are narrow
/// Sums of wide rows and of narrow ones, whose pieces fewer warps share.
struct FedSums {
  Movers wide, narrow;
  constexpr const Movers& of(std::int64_t row_bytes) const {
    return row_bytes <= narrow.stage_bytes ? narrow : wide;
  }
};
constexpr Movers teams(int count, int readers, int stages) {
  return {count, stages, piece_bytes(readers), 1 + readers};
}
// Expert rows that are added; partial sums that are added at home beside those, and beside those that only travel.
constexpr FedSums kPushSums{teams(2, kWideReaders, 6), teams(3, kNarrowReaders, 6)};
constexpr FedSums kHomeSums{teams(1, kWideReaders, 3), teams(2, kNarrowReaders, 5)};
constexpr FedSums kFlatHomeSums{teams(2, kWideReaders, 4), teams(4, kNarrowReaders, 5)};
// The same where home adds its own rank's expert rows too, and where each partial sum is one row, of any width.
constexpr FedSums kLessPushSums{teams(1, kWideReaders, 6), teams(2, kNarrowReaders, 6)};
constexpr FedSums kMoreHomeSums{teams(2, kWideReaders, 4), teams(3, kNarrowReaders, 6)};
constexpr Movers kGroupSums{8, 0, 0};  // the same at home in groups
constexpr Movers kRelaySums{4, 0, 0};  // partial sums that are added at a relay

static_assert(std::max({kPlaceMovers.stages, kNarrowMovers.stages, kRelayMovers.stages, kPushMovers.stages,
                        kNarrowPushMovers.stages}) <= RingWarp<StoreEach>::kMaxStages);
constexpr int most_stages(std::initializer_list<FedSums> sums) {
  int most = 0;
  for (const FedSums& one : sums) most = std::max({most, one.wide.stages, one.narrow.stages});
  return most;
}
static_assert(most_stages({kPushSums, kHomeSums, kFlatHomeSums, kLessPushSums, kMoreHomeSums}) <=
              FeedMover<TermPiece>::kMaxStages);
static_assert(std::max({kPlaceMovers.count, kNarrowMovers.count, kOfferMovers.count, kGroupSums.count,
                        kRelaySums.count, kNarrowPushMovers.count}) <= CrewCounts::kMaxMovers);
static_assert(kPushSums.narrow.count + std::max(kHomeSums.narrow.count, kFlatHomeSums.narrow.count) <=
              FedTeam::kMostTeams);

/// The roles' movers for such rows: fewer where the kernel has no registers for all, shorter rings where the CTA has no
/// memory for all, and longer ones where rows are narrow, so that as many bytes are on their way.
CrewPlan make_plan(int roles, int max_threads, const std::int64_t (&row_bytes)[3],
                   const Movers (&movers)[3]) {
  CrewPlan plan;
  plan.roles = roles;
  for (int role = 0; role < roles; ++role) {
    const auto& [count, stages, most, warps] = movers[role];
    plan.movers[role] = count, plan.mover_warps[role] = warps, plan.stages[role] = stages;
    if (stages == 0) continue;
    // Pieces of a row are alike, and begin at multiples of 128 bytes.
    constexpr std::int64_t kAlign = RingLayout::kAlign;
    const std::int64_t bytes = row_bytes[role], pieces = ceil_div(bytes, static_cast<std::int64_t>(most));
    const auto stage = static_cast<int>(ceil_div(ceil_div(bytes, pieces), kAlign) * kAlign);
    const int most_stages = warps > 1 ? FeedMover<TermPiece>::kMaxStages : RingWarp<StoreEach>::kMaxStages;
    plan.stage_bytes[role] = stage;
    plan.stages[role] = std::max(stages, std::min(most_stages, stages * most / stage));
  }
  while (plan.threads() > max_threads) --*std::max_element(plan.movers, plan.movers + roles);
  while (plan.shared_bytes() > CrewPlan::kSharedBytes) --*std::max_element(plan.stages, plan.stages + roles);
  for (int role = 0; role < roles; ++role)
    if (plan.movers[role] < 1 || (movers[role].stages > 0 && plan.stages[role] < 1))
      throw Error("role " + std::to_string(role) + " of " + std::to_string(roles) +
                  " has no mover for rows of " + std::to_string(row_bytes[role]) + " bytes");
  return plan;
}

template <int kRanks, class Args>
Launch<Args, kRanks> make_launch(const DeviceWorld& world, const std::vector<Args>& args, int op,
                                 double seconds) {
  Launch<Args, kRanks> launch{launched_world(world, seconds), checked_op(op), {}, {}};
  std::ranges::copy(one_each(world, args), launch.args);
  return launch;
}

template <class Teams>
void launch_teams(const DeviceWorld& world, const std::vector<typename Teams::Args>& args, int op,
                  double seconds, std::uintptr_t stream) {
  with_room(world.hosted, [&](auto ranks) {
    const auto launch = make_launch<ranks>(world, args, op, seconds);
    start(&run_teams<Teams, ranks>, launch, world.hosted, Teams::ctas(world.shape), kTeamWarps * 32, 0,
          stream);
  });
}

/// Of an operation that moves rows.
int roles(const DeviceWorld& world) { return world.shape.topology.domains() > 1 ? 3 : 2; }

template <class Crews>
void launch_crews(const DeviceWorld& world, const std::vector<typename Crews::Args>& args,
                  const CrewPlan& plan, int op, double seconds, std::uintptr_t stream) {
  with_room(world.hosted, [&](auto ranks) {
    auto launch = make_launch<ranks>(world, args, op, seconds);
    launch.crews = plan;
    start(&run_crews<Crews, ranks>, launch, world.hosted, world.shape.slices, plan.threads(),
          plan.shared_bytes(), stream);
  });
}

}  // namespace

std::int64_t device_state_bytes(const WindowShape& shape, int hosted) {
  const std::int64_t lines = static_cast<std::int64_t>(shape.slices) * kChannels * shape.topology.ranks;
  return hosted *
         (static_cast<std::int64_t>(sizeof(DeviceState)) + static_cast<std::int64_t>(sizeof(Epoch)) * lines);
}
std::int64_t device_report_bytes(int hosted) {
  return hosted * static_cast<std::int64_t>(sizeof(DeviceReport));
}

void launch_publish(const DeviceWorld& world, const std::vector<PublishArgs>& args, int op, double seconds,
                    std::uintptr_t stream) {
  launch_teams<PublishTeams>(world, args, op, seconds, stream);
}
void launch_records(const DeviceWorld& world, const std::vector<RecordArgs>& args, int op, double seconds,
                    std::uintptr_t stream) {
  launch_teams<RecordTeams>(world, args, op, seconds, stream);
}
void launch_deliver(const DeviceWorld& world, const std::vector<DeliverArgs>& args, int op, double seconds,
                    std::uintptr_t stream) {
  const std::int64_t bytes = args.front().hidden * size_of(args.front().dtype);
  const Movers place = bytes <= kNarrowMovers.stage_bytes ? kNarrowMovers : kPlaceMovers;
  const Movers offer = sends_ahead(WindowLayout(world.shape)) ? kPadMovers : kOfferMovers;
  const CrewPlan plan =
      make_plan(roles(world), DeliverCrews::kMaxThreads, {bytes, bytes, bytes}, {place, offer, kRelayMovers});
  launch_crews<DeliverCrews>(world, args, plan, op, seconds, stream);
}
void launch_collect(const DeviceWorld& world, const std::vector<CollectArgs>& args, int op, double seconds,
                    std::uintptr_t stream) {
  const CollectArgs& rows = args.front();
  const std::int64_t bytes = rows.hidden * size_of(rows.dtype), wire = rows.hidden * size_of(rows.wire);
  const bool only_travels = CollectCrews::only_travels(rows), single = rows.arrivals.top_k == 1;
  const bool adds_own = own_sums(world.shape.topology, rows) == OwnSums::added_at_home;
  const Movers travel = bytes <= kNarrowPushMovers.stage_bytes ? kNarrowPushMovers : kPushMovers;
  const Movers push = only_travels ? travel
                      : single     ? kLessPushSums.narrow
                      : adds_own   ? kLessPushSums.of(bytes)
                                   : kPushSums.of(bytes);
  const Movers home = CollectCrews::adds_groups(rows) ? kGroupSums
                      : only_travels                  ? kFlatHomeSums.of(wire)
                      : single                        ? kMoreHomeSums.narrow
                      : adds_own                      ? kMoreHomeSums.of(wire)
                                                      : kHomeSums.of(wire);
  const CrewPlan plan =
      make_plan(roles(world), CollectCrews::kMaxThreads, {bytes, wire, wire}, {push, home, kRelaySums});
  launch_crews<CollectCrews>(world, args, plan, op, seconds, stream);
}

void launch_leave(const DeviceWorld& world, std::uintptr_t stream) {
  leave_windows<<<world.hosted, 32, 0, reinterpret_cast<cudaStream_t>(stream)>>>(
      WindowLayout(world.shape), world.first_rank, reinterpret_cast<char* const*>(world.windows),
      reinterpret_cast<DeviceState*>(world.states));
  cuda_check(cudaGetLastError(), "leaving windows");
}

bool read_report(const DeviceWorld& world, int hosted, FaultRecord& fault) {
  const auto& report = reinterpret_cast<const DeviceReport*>(world.reports)[hosted];
  if (*static_cast<const volatile std::uint32_t*>(&report.failed) == 0) return false;
  std::memcpy(&fault, &report.fault, sizeof fault);
  return true;
}

}  // namespace flexep
