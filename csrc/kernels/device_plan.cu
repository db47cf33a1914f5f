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

struct alignas(OneSidedSteps) StepsMemory {
  char bytes[sizeof(OneSidedSteps)];
};

/// One CTA of a rank's plan.
class PlanCta {
 public:
  __device__ PlanCta(const CtaOfRank& cta, const OneSidedSteps& steps, CtaPart& part, int* said)
      : cta_(cta), steps_(steps), part_(part), said_(said) {}

  /// A phase of ResolveAndAssign: its blocks, as many as had CountSlots, are dealt to the rank's CTAs. `spilled`: ints of
  /// a block that lie in global memory, if any do.
  template <int kPhase, bool kSpills>
  __device__ void assign(std::int32_t* on_chip, int blocks, std::int64_t spilled) const {
    const ResolveAndAssign& step = steps_.assign;
    for (int block = cta_.number; block < blocks; block += cta_.count) {
      std::int32_t* shared = on_chip;
      if constexpr (kSpills) shared = step.workspace + step.workspace_ints(blocks) + block * spilled;
      step.template phase<kPhase>(CtaBlock(block, blocks), shared);
      __syncthreads();
    }
  }

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
  const PlanCta plan(cta, *reinterpret_cast<const OneSidedSteps*>(memory.bytes), part, &said);
  const auto all_meet = [] { cooperative_groups::this_grid().sync(); };
  const bool begun = part.begin(launch.records_op);
  plan.assign<0, kSpills>(on_chip, rank.blocks, launch.spilled);
  all_meet();
  const bool drops = plan.drops();
  plan.assign<1, kSpills>(on_chip, rank.blocks, launch.spilled);
  plan.expect(drops, begun, launch.counts_op);
  all_meet();
  plan.exchange(begun, launch.records_op);
  all_meet();
  plan.receive();
  part.end();
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
