#include <cooperative_groups.h>

#include "kernels/cta_block.cuh"
#include "kernels/device_part.cuh"
#include "kernels/one_sided_plan.h"
#include "kernels/plan.h"

namespace flexep {
namespace {

/// Two CTAs a slice of a rank, as many as exchange records; two fit on a multiprocessor, so that a plan takes no more of
/// them than its rows do.
constexpr int kCtasOfSm = 2;
constexpr int kCtaLanes = 256;  // with 512, half the registers, the kernels spill

template <int kRanks>
struct CountLaunch {
  LaunchedWorld world;
  int op;
  std::int64_t
      spilled;  // ints of a block in global memory that stand in for shared ones; 0: they fit on the chip
  struct Rank {
    CountSlots step;
    PublishArgs said;
    int blocks;
  } ranks[kRanks];
};

template <int kRanks>
struct PlanLaunch {
  LaunchedWorld world;
  OneSidedSetup setup;
  int counts_op, records_op;
  std::int64_t spilled;
  struct Rank {
    OneSidedInput in;
    int blocks;  // those of CountSlots
  } ranks[kRanks];
};

/// All CTAs of the kernel.
__device__ void all_meet() { cooperative_groups::this_grid().sync(); }

template <bool kSpills, class Step>
__device__ std::int32_t* shared_of(const Step& step, int block, int blocks, std::int32_t* on_chip,
                                   std::int64_t spilled) {
  if constexpr (kSpills) return step.workspace + step.workspace_ints(blocks) + block * spilled;
  return on_chip;
}

/// A phase of a step whose blocks are dealt to a rank's CTAs.
template <int kPhase, bool kSpills, class Step>
__device__ void deal(const Step& step, const CtaOfRank& cta, int blocks, std::int32_t* on_chip,
                     std::int64_t spilled) {
  for (int block = cta.number; block < blocks; block += cta.count) {
    std::int32_t* const shared = shared_of<kSpills>(step, block, blocks, on_chip, spilled);
    step.template phase<kPhase>(CtaBlock(block, blocks), shared);
    __syncthreads();
  }
}

template <bool kSpills, int kRanks>
__global__ void __launch_bounds__(kCtaLanes, kCtasOfSm)
    run_count_cta(const __grid_constant__ CountLaunch<kRanks> launch) {
  extern __shared__ std::int32_t on_chip[];
  __shared__ CtaTables tables;
  __shared__ int said;
  const CtaOfRank cta = CtaOfRank::of_grid(RecordTeams::ctas(launch.world.layout.shape));
  const auto& rank = launch.ranks[cta.hosted];
  CtaPart part(launch.world, tables, cta, PublishTeams::slice(cta.number));
  const bool begun = part.begin(launch.op);
  deal<0, kSpills>(rank.step, cta, rank.blocks, on_chip, launch.spilled);
  all_meet();
  if (cta.number == 0) {  // by one CTA, which then need not wait for others before it tells
    std::int32_t* const shared = shared_of<kSpills>(rank.step, 0, rank.blocks, on_chip, launch.spilled);
    rank.step.add_blocks(CtaBlock(0, rank.blocks), 0, 1, shared);
    __syncthreads();
    if (begun) part.count(play<PublishTeams>(part, launch.op, &said, rank.said), launch.op);
  }
  part.pass(true);
  part.end();
}

/// One CTA of a rank's plan. Each part makes its steps anew from the launch's constants, which no store can change: the
/// compiler then knows that they point to global memory, and keeps what it has loaded.
template <int kRanks>
class PlanCta {
 public:
  __device__ PlanCta(const PlanLaunch<kRanks>& launch, const CtaOfRank& cta, CtaPart& part, int* said)
      : launch_(launch), cta_(cta), part_(part), said_(said) {}

  template <int kPhase, bool kSpills>
  __device__ void assign(std::int32_t* on_chip) const {
    deal<kPhase, kSpills>(steps().assign, cta_, rank().blocks, on_chip, launch_.spilled);
  }

  /// Whether rows were dropped, anywhere: all ranks have seen the same counts, and none needs to be told if not.
  __device__ bool drops() const {
    const ResolveRows layout = steps().assign.resolve;
    if (layout.capacity < 0) return false;
    bool some = false;
    for (int p = static_cast<int>(threadIdx.x); p < layout.table.experts; p += static_cast<int>(blockDim.x))
      some |= layout.dropped[p] != 0;
    return __syncthreads_or(some) != 0;
  }

  /// Rows cleared by all; what goes between peers by one CTA. If rows were dropped that is the CTA of the first block,
  /// which has counted what was kept, and tells it.
  __device__ void expect(bool drops, bool may_tell) const {
    const OneSidedSteps steps = this->steps();
    steps.expect.rows.template phase<0>(CtaBlock(cta_.number, cta_.count), nullptr);
    if (cta_.number == (drops ? 0 : cta_.count - 1)) {
      if (drops && may_tell)
        part_.count(play<PublishTeams>(part_, launch_.counts_op, said_, steps.counts), launch_.counts_op);
      __syncthreads();
      PeerCounts peers = steps.expect.peers;
      if (drops) peers.sent = steps.kept;
      peers.template phase<0>(CtaBlock(0, 1), nullptr);
    }
    if (drops) part_.pass(true);
  }

  /// What this rank was not told it must not read by.
  __device__ void exchange(bool may_tell) const {
    const bool stopped = part_.stopped();
    if (may_tell && !stopped)
      part_.count(play<RecordTeams>(part_, launch_.records_op, said_, steps().records), launch_.records_op);
    part_.pass(false);
  }

  /// Not of records that have not come.
  __device__ void receive() const {
    if (part_.stopped()) return;
    steps().receive.template phase<0>(CtaBlock(cta_.number, cta_.count), nullptr);
  }

 private:
  __device__ const typename PlanLaunch<kRanks>::Rank& rank() const { return launch_.ranks[cta_.hosted]; }
  __device__ OneSidedSteps steps() const { return {launch_.setup, rank().in}; }

  const PlanLaunch<kRanks>& launch_;
  const CtaOfRank cta_;
  CtaPart& part_;
  int* said_;
};

template <bool kSpills, int kRanks>
__global__ void __launch_bounds__(kCtaLanes, kCtasOfSm)
    run_plan_cta(const __grid_constant__ PlanLaunch<kRanks> launch) {
  extern __shared__ std::int32_t on_chip[];
  __shared__ CtaTables tables;
  __shared__ int said;
  const CtaOfRank cta = CtaOfRank::of_grid(RecordTeams::ctas(launch.world.layout.shape));
  CtaPart part(launch.world, tables, cta, RecordTeams::slice(cta.number));
  const PlanCta plan(launch, cta, part, &said);
  const bool begun = part.begin(launch.records_op);
  if (begun) plan.template assign<0, kSpills>(on_chip);
  all_meet();
  const bool drops = plan.drops();
  if (begun) plan.template assign<1, kSpills>(on_chip);
  plan.expect(drops, begun);
  all_meet();
  plan.exchange(begun);
  all_meet();
  plan.receive();
  part.end();
}

/// Sees to shape and shared memory: all ranks' steps have lanes alike, which their experts and ranks decide. fill(i, blocks).
template <class Launch, class Step, class Fill>
void launch_blocks(void (*on_chip)(Launch), void (*spills)(Launch), Launch& launch, const DeviceWorld& world,
                   const std::vector<Step>& steps, const Fill& fill, std::uintptr_t stream) {
  PlanShape shape{};
  for (std::size_t i = 0; i < steps.size(); ++i)
    shape = plan_shape(steps[i], kCtaLanes), fill(i, shape.blocks);
  launch.spilled = spilled_ints(steps.front(), shape.lanes);
  const int ctas = RecordTeams::ctas(world.shape);
  const std::int64_t shared = steps.front().shared_ints(shape.lanes / kWarp, shape.lanes);
  if (launch.spilled > 0)
    start(spills, launch, world.hosted, ctas, shape.lanes, 0, stream);
  else
    start(on_chip, launch, world.hosted, ctas, shape.lanes, sizeof(std::int32_t) * shared, stream);
}

}  // namespace

void count_on_device(const DeviceWorld& world, const std::vector<CountSlots>& steps,
                     const std::vector<std::uintptr_t>& boards, int op, double seconds,
                     std::uintptr_t stream) {
  with_room(world.hosted, [&](auto ranks) {
    CountLaunch<ranks> launch{launched_world(world, seconds), checked_op(op), 0, {}};
    const auto fill = [&](std::size_t i, int blocks) {
      const CountSlots& step = steps[i];
      launch.ranks[i] = {
          step, {step.said, step.said_ints(), reinterpret_cast<std::int32_t*>(boards.at(i))}, blocks};
    };
    launch_blocks(&run_count_cta<false, ranks>, &run_count_cta<true, ranks>, launch, world, steps, fill,
                  stream);
  });
}

void plan_on_device(const DeviceWorld& world, const std::vector<OneSidedPlan>& plans,
                    const PlanMessages& messages, std::uintptr_t stream) {
  std::vector<ResolveAndAssign> steps;
  for (const OneSidedPlan& one : plans) steps.push_back(OneSidedSteps(one.setup, one.in).assign);
  with_room(world.hosted, [&](auto ranks) {
    PlanLaunch<ranks> launch{launched_world(world, messages.seconds),
                             plans.front().setup,
                             checked_op(messages.counts),
                             checked_op(messages.records),
                             0,
                             {}};
    const auto fill = [&](std::size_t i, int blocks) { launch.ranks[i] = {plans[i].in, blocks}; };
    launch_blocks(&run_plan_cta<false, ranks>, &run_plan_cta<true, ranks>, launch, world, steps, fill,
                  stream);
  });
}

}  // namespace flexep
