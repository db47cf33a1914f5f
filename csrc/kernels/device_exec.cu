#include "kernels/device_exec.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>

#include "base/cuda_check.h"
#include "base/error.h"
#include "kernels/device_crews.cuh"
#include "kernels/records.h"

namespace flexep {
namespace {

constexpr int kTeamWarps = 8;  // of a CTA that is one team

template <class Args>
struct Launch {
  WindowLayout layout;
  int first_rank;
  char* const* windows;
  DeviceState* states;
  Epoch* last_used;  // [hosted][slices][kChannels][ranks]
  DeviceReport* reports;
  Moved* moved;  // [hosted][kMaxDeviceOps]
  int op;
  double seconds;
  CrewPlan crews;  // of an operation that moves rows
  Args args[kMaxDeviceRanks];
};

/// What all warps of a CTA look up again and again, in shared memory: global memory's first cache is emptied by every
/// acquire.
template <class Args>
struct CtaTables {
  Args args;
  alignas(WindowLayout) char layout[sizeof(WindowLayout)];
  char* windows[kMaxDeviceRanks];
};

/// One CTA's part of an operation: which rank's, and of which slice. `ctas`: of each rank.
template <class Args>
class CtaPart {
 public:
  __device__ CtaPart(const Launch<Args>& launch, CtaTables<Args>& tables, int ctas, int slice)
      : launch_(launch),
        tables_(tables),
        ctas_(ctas),
        hosted_(static_cast<int>(blockIdx.x) / ctas),
        cta_(static_cast<int>(blockIdx.x) % ctas),
        rank_(launch.first_rank + hosted_),
        state_(launch.states[hosted_]),
        epoch_(state_.window.epoch + 1),  // read before the rank's last CTA to end advances it
        page_(static_cast<int>(state_.window.boards % 2)),
        mem_(tables.windows, launch.layout.shape.topology, rank_, state_) {
    for (int rank = static_cast<int>(threadIdx.x); rank < launch.layout.shape.topology.ranks;
         rank += static_cast<int>(blockDim.x))
      tables.windows[rank] = launch.windows[rank];
    if (threadIdx.x == 0) {
      tables.args = launch.args[hosted_];
      new (tables.layout) WindowLayout(launch.layout.of_slice(slice));
    }
    __syncthreads();
  }

  __device__ const WindowLayout& layout() const {
    return *reinterpret_cast<const WindowLayout*>(tables_.layout);
  }
  __device__ const Args& args() const { return tables_.args; }
  __device__ int cta() const { return cta_; }
  __device__ int page() const { return page_; }
  __device__ WarpMem& mem() { return mem_; }
  __device__ Operation operation() const {
    const WindowShape& shape = layout().shape;
    const std::int64_t lines = static_cast<std::int64_t>(kChannels) * shape.topology.ranks;
    return {rank_, epoch_, launch_.op, launch_.last_used + (hosted_ * shape.slices + layout().slice) * lines,
            launch_.seconds};
  }

  /// Runs work() -> Moved, by all threads, unless this CTA of another operation still runs.
  template <class Work>
  __device__ void run(bool publishes, const Work& work) {
    __shared__ int said;
    Moved moved;
    if (begin_cta(state_, cta_, &said)) {
      moved = work();
    } else if (threadIdx.x < 32) {
      OneWarp one;
      const Operation operation = this->operation();
      Exchange<WarpMem, OneWarp>(mem_, one, layout(), operation).refuse(Status::busy);
    }
    if (!end_cta(state_, cta_, ctas_, moved, launch_.moved[hosted_ * kMaxDeviceOps + launch_.op])) return;
    state_.window.epoch = epoch_;
    if (publishes) ++state_.window.boards;
    if (state_.window.stopped)
      report_failure(launch_.reports[hosted_],
                     *reinterpret_cast<const FaultRecord*>(
                         launch_.windows[rank_] + layout().faults.of(static_cast<std::size_t>(rank_))));
  }

 private:
  const Launch<Args>& launch_;
  const CtaTables<Args>& tables_;
  const int ctas_, hosted_, cta_, rank_;
  DeviceState& state_;
  const Epoch epoch_;
  const int page_;
  WarpMem mem_;
};

struct CopyBytes {
  __device__ void operator()(void* to, const void* from, std::size_t bytes) const {
    WarpMem::copy(to, from, bytes);
  }
};

/// What teams play, by CTA of a rank. Integers: one CTA. Records: two a slice, one that takes and one that sends.
struct PublishTeams {
  using Args = PublishArgs;
  static constexpr bool kPublishes = true;
  FLEXEP_HD static int ctas(const WindowShape&) { return 1; }
  FLEXEP_HD static int slice(const WindowShape&, int) { return 0; }
  template <class Exchange>
  __device__ static void run(int, Exchange& exchange, const Args& args, int page) {
    publish_ints(exchange, page, args, CopyBytes{});
  }
};
struct RecordTeams {
  using Args = RecordArgs;
  static constexpr bool kPublishes = false;
  FLEXEP_HD static int ctas(const WindowShape& shape) { return 2 * shape.slices; }
  FLEXEP_HD static int slice(const WindowShape&, int cta) { return cta / 2; }
  template <class Exchange>
  __device__ static void run(int cta, Exchange& exchange, const Args& args, int) {
    if (cta % 2 == 0)
      take_records(exchange, args, CopyBytes{});
    else
      send_records(exchange, args);
  }
};

template <class Teams>
__global__ void __launch_bounds__(kTeamWarps * 32)
    run_teams(const __grid_constant__ Launch<typename Teams::Args> launch) {
  __shared__ int said;
  __shared__ CtaTables<typename Teams::Args> tables;
  const int ctas = Teams::ctas(launch.layout.shape), cta = static_cast<int>(blockIdx.x) % ctas;
  CtaPart<typename Teams::Args> part(launch, tables, ctas, Teams::slice(launch.layout.shape, cta));
  part.run(Teams::kPublishes, [&] {
    CtaWarps team(&said);
    Exchange<WarpMem, CtaWarps> exchange(part.mem(), team, part.layout(), part.operation());
    Teams::run(cta, exchange, part.args(), part.page());
    return part.mem().moved();
  });
}

template <class Crews>
__global__ void __launch_bounds__(Crews::kMaxThreads, 1)
    run_crews(const __grid_constant__ Launch<typename Crews::Args> launch) {
  extern __shared__ __align__(128) char shared[];
  __shared__ CrewCounts counts[CrewPlan::kMaxRoles];
  __shared__ CtaTables<typename Crews::Args> tables;
  __shared__ Crews crews;
  static_assert(CrewPlan::kSharedBytes + sizeof counts + sizeof tables + sizeof crews <= 227 * 1024,
                "what a CTA of sm_90 may have");
  const int slices = launch.layout.shape.slices;
  CtaPart<typename Crews::Args> part(launch, tables, slices, static_cast<int>(blockIdx.x) % slices);
  if (threadIdx.x < CrewPlan::kMaxRoles) counts[threadIdx.x].clear();
  crews.begin();
  // Both are so for everybody: beginning meets.
  part.run(false, [&] {
    const Operation operation = part.operation();
    CtaCrews cta(launch.crews, part.mem(), part.layout(), operation, counts, shared);
    return crews.run(cta, part.args(), part.layout().shape.topology.ranks);
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

/// How many warps of a CTA move rows for a role, and of each one's ring the stages and the bytes of a stage at most; no
/// stages: ordinary loads and stores.
struct Movers {
  int warps, stages, stage_bytes;
};
// Measured: docs/decisions/crews.md. They change no bits.
constexpr Movers kPlaceMovers{4, 3, 14336};  // rows that arrive
constexpr Movers kOfferMovers{6, 0, 0};      // rows that are offered
constexpr Movers kRelayMovers{2, 8, 3584};   // and those that a relay offers again
constexpr Movers kPushMovers{2, 4, 14336};   // partial sums that only travel
constexpr Movers kPushSums{15, 0, 0};        // expert rows that are added
constexpr Movers kFlatHomeSums{16, 0, 0};    // partial sums that are added at home, beside either of them
constexpr Movers kHomeSums{5, 0, 0};
constexpr Movers kRelaySums{4, 0, 0};  // and at a relay

static_assert(std::max({kPlaceMovers.stages, kRelayMovers.stages, kPushMovers.stages}) <=
              RingWarp<StoreEach>::kMaxStages);
static_assert(std::max(kPushSums.warps, kFlatHomeSums.warps) <= CrewCounts::kMaxMovers);

/// The roles' movers for such rows: fewer where the kernel has no registers for all, and shorter rings where the CTA has
/// no memory for all.
CrewPlan make_plan(int roles, int max_threads, const std::int64_t (&row_bytes)[3],
                   const Movers (&movers)[3]) {
  CrewPlan plan;
  plan.roles = roles;
  for (int role = 0; role < roles; ++role) {
    const auto& [warps, stages, most] = movers[role];
    plan.movers[role] = warps, plan.stages[role] = stages;
    if (stages == 0) continue;
    // Pieces of a row are alike, and begin at multiples of 128 bytes.
    constexpr std::int64_t kAlign = RingLayout::kAlign;
    const std::int64_t bytes = row_bytes[role], pieces = ceil_div(bytes, static_cast<std::int64_t>(most));
    plan.stage_bytes[role] = static_cast<int>(ceil_div(ceil_div(bytes, pieces), kAlign) * kAlign);
  }
  while (plan.threads() > max_threads) --*std::max_element(plan.movers, plan.movers + roles);
  while (plan.shared_bytes() > CrewPlan::kSharedBytes) --*std::max_element(plan.stages, plan.stages + roles);
  return plan;
}

template <class Args>
Launch<Args> make_launch(const DeviceWorld& world, const std::vector<Args>& args, int op, double seconds) {
  const WindowShape& shape = world.shape;
  if (op >= kMaxDeviceOps) throw Error("operation " + std::to_string(op) + ": too large a number");
  if (world.hosted > kMaxDeviceRanks)
    throw Error(std::to_string(world.hosted) + " ranks on one GPU: at most " +
                std::to_string(kMaxDeviceRanks));
  if (shape.slices > kMaxDeviceSlices)
    throw Error(std::to_string(shape.slices) + " slices: at most " + std::to_string(kMaxDeviceSlices));
  auto* const states = reinterpret_cast<DeviceState*>(world.states);
  Launch<Args> launch{WindowLayout(shape),
                      world.first_rank,
                      reinterpret_cast<char* const*>(world.windows),
                      states,
                      reinterpret_cast<Epoch*>(states + world.hosted),
                      reinterpret_cast<DeviceReport*>(world.reports),
                      reinterpret_cast<Moved*>(world.moved),
                      op,
                      seconds,
                      {},
                      {}};
  std::copy(args.begin(), args.end(), launch.args);
  return launch;
}

template <class Launch>
void start(void (*kernel)(Launch), const Launch& launch, int hosted, int ctas, int threads,
           std::size_t shared, std::uintptr_t stream) {
  Launch copy = launch;
  void* params[] = {&copy};
  const auto* const function = reinterpret_cast<const void*>(kernel);
  if (shared > 0)
    cuda_check(
        cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)),
        "shared memory of a one-sided launch");
  const cudaError_t error = cudaLaunchCooperativeKernel(function, dim3(hosted * ctas), dim3(threads), params,
                                                        shared, reinterpret_cast<cudaStream_t>(stream));
  if (error == cudaErrorCooperativeLaunchTooLarge)
    throw Error(std::to_string(hosted) + " ranks need " + std::to_string(hosted * ctas) +
                " CTAs at once, more than this GPU holds");
  cuda_check(error, "one-sided launch");
}

template <class Teams>
void launch_teams(const DeviceWorld& world, const std::vector<typename Teams::Args>& args, int op,
                  double seconds, std::uintptr_t stream) {
  const auto launch = make_launch(world, args, op, seconds);
  const int ctas = Teams::ctas(world.shape);
  if (ctas > DeviceState::kMaxCtas)
    throw Error(std::to_string(ctas) + " CTAs of a rank: at most " + std::to_string(DeviceState::kMaxCtas));
  start(&run_teams<Teams>, launch, world.hosted, ctas, kTeamWarps * 32, 0, stream);
}

/// Of an operation that moves rows.
int roles(const DeviceWorld& world) { return world.shape.topology.domains() > 1 ? 3 : 2; }

template <class Crews>
void launch_crews(const DeviceWorld& world, const std::vector<typename Crews::Args>& args,
                  const CrewPlan& plan, int op, double seconds, std::uintptr_t stream) {
  auto launch = make_launch(world, args, op, seconds);
  launch.crews = plan;
  start(&run_crews<Crews>, launch, world.hosted, world.shape.slices, plan.threads(), plan.shared_bytes(),
        stream);
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
  const CrewPlan plan = make_plan(roles(world), DeliverCrews::kMaxThreads, {bytes, bytes, bytes},
                                  {kPlaceMovers, kOfferMovers, kRelayMovers});
  launch_crews<DeliverCrews>(world, args, plan, op, seconds, stream);
}
void launch_collect(const DeviceWorld& world, const std::vector<CollectArgs>& args, int op, double seconds,
                    std::uintptr_t stream) {
  const CollectArgs& rows = args.front();
  const std::int64_t bytes = rows.hidden * size_of(rows.dtype), wire = rows.hidden * size_of(rows.wire);
  const bool only_travels = CollectCrews::only_travels(rows);
  const CrewPlan plan = make_plan(
      roles(world), CollectCrews::kMaxThreads, {bytes, wire, wire},
      {only_travels ? kPushMovers : kPushSums, only_travels ? kFlatHomeSums : kHomeSums, kRelaySums});
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
