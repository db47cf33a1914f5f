#include <cooperative_groups.h>

#include <algorithm>

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
  // Ints of a block in global memory that stand in for shared ones; 0: they fit on the chip.
  std::int64_t spilled;
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

/// What a CTA does to count and to tell. Its operation has begun, if `begun`.
template <bool kSpills, int kRanks>
__device__ void count_and_tell(const CountLaunch<kRanks>& launch, const CtaOfRank& cta, CtaPart& part,
                               bool begun, std::int32_t* on_chip, int* said) {
  const auto& rank = launch.ranks[cta.hosted];
  deal<0, kSpills>(rank.step, cta, rank.blocks, on_chip, launch.spilled);
  all_meet();
  if (cta.number == 0) {  // by one CTA, which then need not wait for others before it tells
    std::int32_t* const shared = shared_of<kSpills>(rank.step, 0, rank.blocks, on_chip, launch.spilled);
    rank.step.add_blocks(CtaBlock(0, rank.blocks), 0, 1, shared);
    __syncthreads();
    if (begun) part.count(play<PublishTeams>(part, launch.op, said, rank.said), launch.op);
  }
  part.pass(true);
}

template <bool kSpills, int kRanks>
__global__ void __launch_bounds__(kCtaLanes, kCtasOfSm)
    run_count_cta(const __grid_constant__ CountLaunch<kRanks> launch) {
  extern __shared__ std::int32_t on_chip[];
  __shared__ CtaTables tables;
  __shared__ int said;
  const CtaOfRank cta = CtaOfRank::of_grid(RecordTeams::ctas(launch.world.layout.shape));
  CtaPart part(launch.world, tables, cta, PublishTeams::slice(cta.number));
  const bool begun = part.begin(launch.op);
  count_and_tell<kSpills>(launch, cta, part, begun, on_chip, &said);
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

/// All of a CTA's plan. Its operation has begun, if `begun`.
template <bool kSpills, int kRanks>
__device__ void make_plan(const PlanLaunch<kRanks>& launch, const CtaOfRank& cta, CtaPart& part, bool begun,
                          std::int32_t* on_chip, int* said) {
  const PlanCta plan(launch, cta, part, said);
  if (begun) plan.template assign<0, kSpills>(on_chip);
  all_meet();
  const bool drops = plan.drops();
  if (begun) plan.template assign<1, kSpills>(on_chip);
  plan.expect(drops, begun);
  all_meet();
  plan.exchange(begun);
  all_meet();
  plan.receive();
}

template <bool kSpills, int kRanks>
__global__ void __launch_bounds__(kCtaLanes, kCtasOfSm)
    run_plan_cta(const __grid_constant__ PlanLaunch<kRanks> launch) {
  extern __shared__ std::int32_t on_chip[];
  __shared__ CtaTables tables;
  __shared__ int said;
  const CtaOfRank cta = CtaOfRank::of_grid(RecordTeams::ctas(launch.world.layout.shape));
  CtaPart part(launch.world, tables, cta, RecordTeams::slice(cta.number));
  const bool begun = part.begin(launch.records_op);
  make_plan<kSpills>(launch, cta, part, begun, on_chip, &said);
  part.end();
}

/// Both, of one rank: a launch carries no more arguments.
struct CountAndPlanLaunch {
  CountLaunch<1> count;
  PlanLaunch<1> plan;
};

__global__ void __launch_bounds__(kCtaLanes, kCtasOfSm)
    run_count_and_plan_cta(const __grid_constant__ CountAndPlanLaunch launch) {
  extern __shared__ std::int32_t on_chip[];
  __shared__ CtaTables tables;
  __shared__ int said;
  const LaunchedWorld& world = launch.count.world;
  const CtaOfRank cta = CtaOfRank::of_grid(RecordTeams::ctas(world.layout.shape));
  // The first CTA, which tells, has slice 0, as PublishTeams wants it.
  CtaPart part(world, tables, cta, RecordTeams::slice(cta.number));
  const bool begun = part.begin(launch.count.op);
  count_and_tell<false>(launch.count, cta, part, begun, on_chip, &said);
  all_meet();
  make_plan<false>(launch.plan, cta, part, begun && !part.stopped(), on_chip, &said);
  part.end();
}

/// Blocks and lanes of a step, ints of a block in global memory that stand in for shared ones, and shared ones. All ranks'
/// steps have lanes alike, which their experts and ranks decide.
struct BlockLaunch {
  PlanShape shape;
  std::int64_t spilled, shared;

  template <class Step>
  explicit BlockLaunch(const Step& step)
      : shape(plan_shape(step, kCtaLanes)),
        spilled(spilled_ints(step, shape.lanes)),
        shared(step.shared_ints(shape.lanes / kWarp, shape.lanes)) {}
  std::size_t shared_bytes() const { return spilled > 0 ? 0 : sizeof(std::int32_t) * shared; }
};

template <int kRanks>
CountLaunch<kRanks> count_launch(const LaunchedWorld& world, const SlotsToCount& slots) {
  CountLaunch<kRanks> launch{world, checked_op(slots.op), BlockLaunch(slots.steps.front()).spilled, {}};
  for (std::size_t i = 0; i < slots.steps.size(); ++i) {
    const CountSlots& step = slots.steps[i];
    launch.ranks[i] = {step,
                       {step.said, step.said_ints(), reinterpret_cast<std::int32_t*>(slots.boards.at(i))},
                       BlockLaunch(step).shape.blocks};
  }
  return launch;
}

ResolveAndAssign assign_step(const OneSidedPlan& plan) { return OneSidedSteps(plan.setup, plan.in).assign; }

template <int kRanks>
PlanLaunch<kRanks> plan_launch(const LaunchedWorld& world, const std::vector<OneSidedPlan>& plans,
                               const PlanMessages& messages) {
  PlanLaunch<kRanks> launch{world,
                            plans.front().setup,
                            checked_op(messages.counts),
                            checked_op(messages.records),
                            BlockLaunch(assign_step(plans.front())).spilled,
                            {}};
  for (std::size_t i = 0; i < plans.size(); ++i)
    launch.ranks[i] = {plans[i].in, BlockLaunch(assign_step(plans[i])).shape.blocks};
  return launch;
}

template <class Launch>
void start_blocks(void (*on_chip)(Launch), void (*spills)(Launch), const Launch& launch,
                  const DeviceWorld& world, const BlockLaunch& blocks, std::uintptr_t stream) {
  start(blocks.spilled > 0 ? spills : on_chip, launch, world.hosted, RecordTeams::ctas(world.shape),
        blocks.shape.lanes, blocks.shared_bytes(), stream);
}

}  // namespace

void count_on_device(const DeviceWorld& world, const SlotsToCount& slots, double seconds,
                     std::uintptr_t stream) {
  one_each(world, slots.steps);
  with_room(world.hosted, [&](auto ranks) {
    start_blocks(&run_count_cta<false, ranks>, &run_count_cta<true, ranks>,
                 count_launch<ranks>(launched_world(world, seconds), slots), world,
                 BlockLaunch(slots.steps.front()), stream);
  });
}

void plan_on_device(const DeviceWorld& world, const std::vector<OneSidedPlan>& plans,
                    const PlanMessages& messages, std::uintptr_t stream) {
  one_each(world, plans);
  with_room(world.hosted, [&](auto ranks) {
    start_blocks(&run_plan_cta<false, ranks>, &run_plan_cta<true, ranks>,
                 plan_launch<ranks>(launched_world(world, messages.seconds), plans, messages), world,
                 BlockLaunch(assign_step(plans.front())), stream);
  });
}

void count_and_plan_on_device(const DeviceWorld& world, const SlotsToCount& slots,
                              const std::vector<OneSidedPlan>& plans, const PlanMessages& messages,
                              std::uintptr_t stream) {
  one_each(world, slots.steps), one_each(world, plans);
  const BlockLaunch count(slots.steps.front()), plan(assign_step(plans.front()));
  const bool alike = count.spilled == 0 && plan.spilled == 0 && count.shape.lanes == plan.shape.lanes;
  if (world.hosted > 1 || !alike) {
    count_on_device(world, slots, messages.seconds, stream);
    plan_on_device(world, plans, messages, stream);
    return;
  }
  const LaunchedWorld launched = launched_world(world, messages.seconds);
  const CountAndPlanLaunch launch{count_launch<1>(launched, slots),
                                  plan_launch<1>(launched, plans, messages)};
  start(&run_count_and_plan_cta, launch, world.hosted, RecordTeams::ctas(world.shape), plan.shape.lanes,
        std::max(count.shared_bytes(), plan.shared_bytes()), stream);
}

}  // namespace flexep
