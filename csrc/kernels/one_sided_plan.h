// The plan of a dispatch over windows that reach every rank, from what everybody has published to the maps of received
// rows, in one call. On a GPU: one kernel for all hosted ranks, its messages included; and one that counts and publishes
// before it.
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
/// Counts slots and tells everybody what is said of them, in one launch. boards: addresses, one a hosted rank, of the
/// [ranks, said_ints] where it gets everybody's. These throw as the operations of device_exec.h do.
void count_on_device(const DeviceWorld& world, const std::vector<CountSlots>& steps,
                     const std::vector<std::uintptr_t>& boards, int op, double seconds,
                     std::uintptr_t stream);
void plan_on_device(const DeviceWorld& world, const std::vector<OneSidedPlan>& ranks,
                    const PlanMessages& messages, std::uintptr_t stream);

}  // namespace flexep
