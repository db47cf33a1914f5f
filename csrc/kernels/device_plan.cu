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

struct CountLaunch {
  LaunchedWorld world;
  int op;
  std::int64_t
      spilled;  // ints of a block in global memory that stand in for shared ones; 0: they fit on the chip
  struct Rank {
    CountSlots step;
    PublishArgs said;
    int blocks;
  } ranks[kMaxDeviceRanks];
};

struct PlanLaunch {
  LaunchedWorld world;
  OneSidedSetup setup;
  int counts_op, records_op;
  std::int64_t spilled;
  struct Rank {
    OneSidedInput in;
    int blocks;  // those of CountSlots
  } ranks[kMaxDeviceRanks];
};

/// All CTAs of the kernel.
__device__ void all_meet() { cooperative_groups::this_grid().sync(); }

/// A phase of a step whose blocks are dealt to a rank's CTAs.
template <int kPhase, bool kSpills, class Step>
__device__ void deal(const Step& step, const CtaOfRank& cta, int blocks, std::int32_t* on_chip,
                     std::int64_t spilled) {
  for (int block = cta.number; block < blocks; block += cta.count) {
    std::int32_t* shared = on_chip;
    if constexpr (kSpills) shared = step.workspace + step.workspace_ints(blocks) + block * spilled;
    step.template phase<kPhase>(CtaBlock(block, blocks), shared);
    __syncthreads();
  }
}

template <bool kSpills>
__global__ void __launch_bounds__(kPlanLanes, kCtasOfSm)
    run_count_cta(const __grid_constant__ CountLaunch launch) {
  extern __shared__ std::int32_t on_chip[];
  __shared__ CtaTables tables;
  __shared__ int said;
  const CtaOfRank cta = CtaOfRank::of_grid(RecordTeams::ctas(launch.world.layout.shape));
  const CountLaunch::Rank& rank = launch.ranks[cta.hosted];
  CtaPart part(launch.world, tables, cta, PublishTeams::slice(cta.number));
  const bool begun = part.begin(launch.op);
  deal<0, kSpills>(rank.step, cta, rank.blocks, on_chip, launch.spilled);
  all_meet();
  deal<1, kSpills>(rank.step, cta, rank.blocks, on_chip, launch.spilled);
  all_meet();
  if (begun && cta.number == 0) part.count(play<PublishTeams>(part, launch.op, &said, rank.said), launch.op);
  part.pass(true);
  part.end();
}

struct alignas(OneSidedSteps) StepsMemory {
  char bytes[sizeof(OneSidedSteps)];
};

/// One CTA of a rank's plan.
class PlanCta {
 public:
  __device__ PlanCta(const CtaOfRank& cta, const OneSidedSteps& steps, CtaPart& part, int* said)
      : cta_(cta), steps_(steps), part_(part), said_(said) {}

  /// Whether rows were dropped, anywhere: all ranks have seen the same counts, and none needs to be told if not.
  __device__ bool drops() const {
    if (steps_.assign.resolve.capacity < 0) return false;
    bool some = false;
    for (int p = static_cast<int>(threadIdx.x); p < steps_.assign.table.experts;
         p += static_cast<int>(blockDim.x))
      some |= steps_.assign.resolve.dropped[p] != 0;
    return __syncthreads_or(some) != 0;
  }

  /// Rows cleared by all; what goes between peers by one CTA. If rows were dropped that is the CTA of the first block,
  /// which has counted what was kept, and tells it.
  __device__ void expect(bool drops, bool may_tell, int op) const {
    steps_.expect.rows.template phase<0>(CtaBlock(cta_.number, cta_.count), nullptr);
    if (cta_.number == (drops ? 0 : cta_.count - 1)) {
      __syncthreads();
      if (drops && may_tell) part_.count(play<PublishTeams>(part_, op, said_, steps_.counts), op);
      __syncthreads();
      PeerCounts peers = steps_.expect.peers;
      if (drops) peers.sent = steps_.kept;
      peers.template phase<0>(CtaBlock(0, 1), nullptr);
    }
    if (drops) part_.pass(true);
  }

  /// What this rank was not told it must not read by.
  __device__ void exchange(bool may_tell, int op) const {
    if (may_tell && !part_.stopped()) part_.count(play<RecordTeams>(part_, op, said_, steps_.records), op);
    part_.pass(false);
  }

  __device__ void receive() const {
    steps_.receive.template phase<0>(CtaBlock(cta_.number, cta_.count), nullptr);
  }

 private:
  const CtaOfRank cta_;
  const OneSidedSteps& steps_;  // in shared memory
  CtaPart& part_;
  int* said_;
};

template <bool kSpills>
__global__ void __launch_bounds__(kPlanLanes, kCtasOfSm)
    run_plan_cta(const __grid_constant__ PlanLaunch launch) {
  extern __shared__ std::int32_t on_chip[];
  __shared__ CtaTables tables;
  __shared__ StepsMemory memory;
  __shared__ int said;
  const CtaOfRank cta = CtaOfRank::of_grid(RecordTeams::ctas(launch.world.layout.shape));
  const PlanLaunch::Rank& rank = launch.ranks[cta.hosted];
  if (threadIdx.x == 0) new (memory.bytes) OneSidedSteps(launch.setup, rank.in);
  CtaPart part(launch.world, tables, cta, RecordTeams::slice(cta.number));  // all have met
  const auto& steps = *reinterpret_cast<const OneSidedSteps*>(memory.bytes);
  const PlanCta plan(cta, steps, part, &said);
  const bool begun = part.begin(launch.records_op);
  deal<0, kSpills>(steps.assign, cta, rank.blocks, on_chip, launch.spilled);
  all_meet();
  const bool drops = plan.drops();
  deal<1, kSpills>(steps.assign, cta, rank.blocks, on_chip, launch.spilled);
  plan.expect(drops, begun, launch.counts_op);
  all_meet();
  plan.exchange(begun, launch.records_op);
  all_meet();
  plan.receive();
  part.end();
}

/// Sees to shape and shared memory: all ranks' steps have lanes alike. fill(i, blocks).
template <class Launch, class Step, class Fill>
void launch_blocks(void (*on_chip)(Launch), void (*spills)(Launch), Launch& launch, const DeviceWorld& world,
                   const std::vector<Step>& steps, const Fill& fill, std::uintptr_t stream) {
  PlanShape shape{};
  for (std::size_t i = 0; i < steps.size(); ++i) shape = plan_shape(steps[i]), fill(i, shape.blocks);
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
                     const std::vector<PublishArgs>& said, int op, double seconds, std::uintptr_t stream) {
  CountLaunch launch{launched_world(world, seconds), checked_op(op), 0, {}};
  const auto fill = [&](std::size_t i, int blocks) { launch.ranks[i] = {steps[i], said[i], blocks}; };
  launch_blocks(&run_count_cta<false>, &run_count_cta<true>, launch, world, steps, fill, stream);
}

void plan_on_device(const DeviceWorld& world, const std::vector<OneSidedPlan>& ranks,
                    const PlanMessages& messages, std::uintptr_t stream) {
  PlanLaunch launch{launched_world(world, messages.seconds),
                    ranks.front().setup,
                    checked_op(messages.counts),
                    checked_op(messages.records),
                    0,
                    {}};
  std::vector<ResolveAndAssign> steps;
  for (const OneSidedPlan& one : ranks) steps.push_back(OneSidedSteps(one.setup, one.in).assign);
  const auto fill = [&](std::size_t i, int blocks) { launch.ranks[i] = {ranks[i].in, blocks}; };
  launch_blocks(&run_plan_cta<false>, &run_plan_cta<true>, launch, world, steps, fill, stream);
}

}  // namespace flexep
