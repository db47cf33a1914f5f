// Runs a plan step: on the host by one lane, on a GPU by one kernel a phase. Same text, same integers.
//
// Tuning, reckoned for T = 8192, K = 8, E = 256 (65,536 slots) on 132 SMs; nothing here changes an integer.
//   bytes    ids 0.26 MB in, row map and row_src 0.65 MB out, counts 64 x 257 ints: all in L2, below 1 us together
//   launches two, about 2 us each from launch to first load and from last store to the next kernel; the second is a
//            programmatic dependent one, so that its launch hides behind the first
//   phase 0  1 round trip for ids (0.7 us), 2 rounds of match and shared counts, sum over 16 warps, 1 round trip
//   phase 1  2 batches of 32 loads down each column of counts, layout by one warp (8 places a lane), then 2 rounds of
//            one dependent load (id), one shared read, two stores
// About 3 + 4 us. A block of more slots reads fewer rows of counts but stores more (an SM takes about one scattered
// store a cycle); at 1024 slots a block the two are equal. More blocks than kCountingBlocks cost more to add up than
// they save. Over windows the phases of several steps share a kernel, a grid barrier between them: device_plan.cu.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "plan/assign.h"
#include "plan/counts.h"
#include "plan/peers.h"
#include "plan/permutation.h"
#include "plan/receive.h"
#include "plan/relay.h"
#include "plan/resolve.h"
#include "plan/transpose.h"

namespace flexep {

inline constexpr int kWarp = 32;
inline constexpr int kPlanLanes = 512;       // of a block, where the step's shared memory allows
inline constexpr int kCountingBlocks = 128;  // most blocks of a step whose blocks add up each other's counts
inline constexpr int kPlainBlocks = 2048;    // most blocks of a step whose lanes share nothing
inline constexpr int kItemsPerBlock = 1024;  // slots or rows
inline constexpr int64_t kSharedInts =
    24 * 1024;  // of a block on the chip; what needs more lives in the workspace

/// Blocks and lanes of a launch.
struct PlanShape {
  int blocks, lanes;
};

template <class Step>
PlanShape plan_shape(const Step& step, int most_lanes = kPlanLanes) {
  constexpr bool counts = requires { step.workspace_ints(1); };
  const int64_t wanted = (step.items() + kItemsPerBlock - 1) / kItemsPerBlock;
  int lanes = most_lanes;
  while (lanes > kWarp && step.shared_ints(lanes / kWarp, lanes) > kSharedInts) lanes /= 2;
  return {static_cast<int>(std::clamp<int64_t>(wanted, 1, counts ? kCountingBlocks : kPlainBlocks)), lanes};
}

/// The ranks are laid out independently of each other: a block each.
inline PlanShape plan_shape(const ResolveRows& step) {
  return {std::min(step.table.ranks, kPlainBlocks), kPlanLanes};
}

/// Ints of global memory for the step's shared ones, a block, where the chip's do not do; else 0.
template <class Step>
int64_t spilled_ints(const Step& step, int lanes) {
  const int64_t ints = step.shared_ints(lanes / kWarp, lanes);
  return ints > kSharedInts ? ints : 0;
}

/// Workspace ints of a launch with as many blocks and lanes as `shape`.
template <class Step>
int64_t launch_ints(const Step& step, PlanShape shape) {
  return step.workspace_ints(shape.blocks) + shape.blocks * spilled_ints(step, shape.lanes);
}

/// Enqueues a plan step on a CUDA stream and returns at once. Throws NotBuilt when this build has no CUDA side, Error when a
/// launch is refused.
template <class Step>
void launch_plan(const Step& step, PlanShape shape, uintptr_t stream);

/// Calls X(Step) for every step that can be launched.
#define FLEXEP_EACH_PLAN_STEP(X) \
  X(CountSlots)                  \
  X(ResolveRows)                 \
  X(AssignRows)                  \
  X(PeerCounts)                  \
  X(RelayRecords)                \
  X(ClearRows)                   \
  X(ReceiveRows)                 \
  X(InvertRows)                  \
  X(CompactRows)                 \
  X(PlanPermutation)             \
  X(TransposeChunks)

/// Runs a plan step by one lane, now.
template <class Step>
void run_plan(const Step& step) {
  std::vector<int32_t> shared(static_cast<size_t>(step.shared_ints(1, 1)));
  run_solo(step, shared.data());
}

}  // namespace flexep
