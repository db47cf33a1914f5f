// The plan of a dispatch over windows that reach every rank, from what everybody has published to the maps of received
// rows, in one call. On a GPU: one kernel for all hosted ranks, its messages included; and one that counts and publishes
// before it, or the same one where nobody looks at what was published in between.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels/device_exec.h"
#include "kernels/host_exec.h"
#include "kernels/one_sided_steps.h"

namespace flexep {

/// One rank's plan.
struct OneSidedPlan {
  OneSidedSetup setup;
  OneSidedInput in;
};

/// Ints of scratch memory that a plan needs until it is made.
std::int64_t scratch_ints(const OneSidedSetup& setup, int tokens, int left, int received, bool has_weights);

/// Numbers of the two messages, and the seconds of every wait in them.
struct PlanMessages {
  int counts, records;
  double seconds;
};

/// One plan for each hosted rank, with a setup alike. Reports of each message, none of the first where no rank dropped
/// rows and it was not sent; none follows one that failed.
std::vector<std::vector<Report>> plan_on_host(HostWindows& windows, const std::vector<OneSidedPlan>& ranks,
                                              const PlanMessages& messages);

/// The slots of the hosted ranks, to be counted and told in operation `op`. boards: addresses, one a hosted rank, of the
/// [ranks, said_ints] where it gets what everybody says.
struct SlotsToCount {
  std::vector<CountSlots> steps;
  std::vector<std::uintptr_t> boards;
  int op;
};
/// Counts slots and tells everybody what is said of them, in one launch. These throw as the operations of device_exec.h
/// do.
void count_on_device(const DeviceWorld& world, const SlotsToCount& slots, double seconds,
                     std::uintptr_t stream);
void plan_on_device(const DeviceWorld& world, const std::vector<OneSidedPlan>& plans,
                    const PlanMessages& messages, std::uintptr_t stream);
/// One after the other; of a single hosted rank in one launch, if there is room on the chip.
void count_and_plan_on_device(const DeviceWorld& world, const SlotsToCount& slots,
                              const std::vector<OneSidedPlan>& plans, const PlanMessages& messages,
                              std::uintptr_t stream);

}  // namespace flexep
