#include <cooperative_groups.h>

#include "kernels/cta_block.cuh"
#include "kernels/device_part.cuh"
#include "kernels/one_sided_plan.h"
#include "kernels/plan.h"

namespace flexep {
namespace {

struct PlanLaunch {
  LaunchedWorld world;
  OneSidedSetup setup;
  int counts_op, records_op;
  std::int64_t
      spilled;  // ints of a block in global memory that stand in for shared ones; 0: they fit on the chip
  struct Rank {
    OneSidedInput in;
    int blocks;  // those of CountSlots
  } ranks[kMaxDeviceRanks];
};

/// Two CTAs a slice of a rank, as many as exchange records; two fit on a multiprocessor, so that a plan takes no more of
/// them than its rows do.
constexpr int kCtasOfSm = 2;

/// One CTA of a rank's plan. Each part makes the steps anew from the launch's constants: nothing is kept in registers,
/// and nothing is looked up in memory.
class PlanCta {
 public:
  __device__ PlanCta(const PlanLaunch& launch, CtaTables& tables, int* said)
      : launch_(launch),
        tables_(tables),
        said_(said),
        cta_(CtaOfRank::of_grid(RecordTeams::ctas(launch.world.layout.shape))) {}

  /// A phase of ResolveAndAssign: its blocks, as many as had CountSlots, are dealt to the rank's CTAs.
  template <int kPhase, bool kSpills>
  __device__ void assign(std::int32_t* on_chip) const {
    const ResolveAndAssign step = steps().assign;
    const int blocks = rank().blocks;
    for (int block = cta_.number; block < blocks; block += cta_.count) {
      std::int32_t* shared = on_chip;
      if constexpr (kSpills) shared = step.workspace + step.workspace_ints(blocks) + block * launch_.spilled;
      __syncthreads();
      step.template phase<kPhase>(CtaBlock(block, blocks), shared);
    }
  }

  /// Rows cleared by all; by one CTA what goes between peers: with a capacity that of the first block, which has counted
  /// what is kept, and tells it.
  __device__ void expect() const {
    const ExpectRows step = steps().expect;
    step.rows.template phase<0>(CtaBlock(cta_.number, cta_.count), nullptr);
    const bool drops = launch_.setup.capacity >= 0;
    if (cta_.number != (drops ? 0 : cta_.count - 1)) return;
    __syncthreads();
    if (drops) {
      CtaPart part(launch_.world, tables_, {cta_.hosted, 0, 1}, 0, launch_.counts_op);
      part.run(true, [&] { return play<PublishTeams>(part, said_, steps().counts); });
      __syncthreads();
    }
    step.peers.template phase<0>(CtaBlock(0, 1), nullptr);
  }

  /// Records go, unless this rank has stopped: what it was not told it must not read by.
  __device__ void exchange() const {
    CtaPart part(launch_.world, tables_, cta_, RecordTeams::slice(cta_.number), launch_.records_op);
    const bool stopped = launch_.world.states[cta_.hosted].window.stopped != 0;
    part.run(false, [&] { return stopped ? Moved{} : play<RecordTeams>(part, said_, steps().records); });
  }

  __device__ void receive() const {
    steps().receive.template phase<0>(CtaBlock(cta_.number, cta_.count), nullptr);
  }

 private:
  __device__ const PlanLaunch::Rank& rank() const { return launch_.ranks[cta_.hosted]; }
  __device__ OneSidedSteps steps() const { return {launch_.setup, rank().in}; }

  const PlanLaunch& launch_;
  CtaTables& tables_;
  int* said_;
  const CtaOfRank cta_;
};

template <bool kSpills>
__global__ void __launch_bounds__(kPlanLanes, kCtasOfSm)
    run_plan_cta(const __grid_constant__ PlanLaunch launch) {
  extern __shared__ std::int32_t on_chip[];
  __shared__ CtaTables tables;
  __shared__ int said;
  const PlanCta cta(launch, tables, &said);
  const auto all_meet = [] { cooperative_groups::this_grid().sync(); };
  cta.assign<0, kSpills>(on_chip);
  all_meet();
  cta.assign<1, kSpills>(on_chip);
  cta.expect();
  all_meet();
  cta.exchange();
  all_meet();
  cta.receive();
}

}  // namespace

void plan_on_device(const DeviceWorld& world, const std::vector<OneSidedPlan>& ranks,
                    const PlanMessages& messages, std::uintptr_t stream) {
  PlanLaunch launch{launched_world(world, messages.seconds),
                    ranks.front().setup,
                    checked_op(messages.counts),
                    checked_op(messages.records),
                    0,
                    {}};
  int lanes = 0;
  std::int64_t shared = 0;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const ResolveAndAssign step = OneSidedSteps(ranks[i].setup, ranks[i].in).assign;
    const PlanShape shape = plan_shape(step);  // but for the blocks the same for all
    launch.ranks[i] = {ranks[i].in, shape.blocks};
    launch.spilled = spilled_ints(step, shape.lanes);
    lanes = shape.lanes, shared = step.shared_ints(shape.lanes / kWarp, shape.lanes);
  }
  const int ctas = RecordTeams::ctas(world.shape);
  if (launch.spilled > 0)
    start(&run_plan_cta<true>, launch, world.hosted, ctas, lanes, 0, stream);
  else
    start(&run_plan_cta<false>, launch, world.hosted, ctas, lanes, sizeof(std::int32_t) * shared, stream);
}

}  // namespace flexep
