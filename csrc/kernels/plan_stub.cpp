// Stands in for plan.cu in a build without nvcc: every entry raises with the option to set.
#if !defined(FLEXEP_WITH_CUDA)
#include "base/error.h"
#include "kernels/plan.h"

namespace flexep {

template <class Step>
void launch_plan(const Step&, PlanShape, uintptr_t) {
  throw NotBuilt(
      "the plan for CUDA tensors is not in this build; build with nvcc on PATH and -DFLEXEP_CUDA=ON");
}

#define FLEXEP_LAUNCH(Step) template void launch_plan(const Step&, PlanShape, uintptr_t);
FLEXEP_EACH_PLAN_STEP(FLEXEP_LAUNCH)

}  // namespace flexep
#endif
