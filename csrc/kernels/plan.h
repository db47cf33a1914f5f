// Runs a plan step: on the host by one lane, on a GPU by one CTA whose threads are the lanes. Same text, same
// integers.
#pragma once
#include <cstdint>

#include "base/team.h"
#include "plan/assign.h"
#include "plan/counts.h"
#include "plan/receive.h"
#include "plan/resolve.h"

namespace flexep {

/// Lanes of the CTA that runs a plan step; workspaces are sized with it.
inline constexpr int kPlanLanes = 256;

/// Enqueues one plan step on a CUDA stream and returns at once. Throws NotBuilt when this build has no CUDA
/// side, Error when the launch is refused.
template <class Step>
void launch_plan(const Step& step, uintptr_t stream);

}  // namespace flexep
