// Stands in for plan.cu in a build without nvcc: every entry raises with the option to set.
#if !defined(FLEXEP_WITH_CUDA)
#include "base/error.h"
#include "kernels/plan.h"

namespace flexep {

template <class Step>
void launch_plan(const Step&, uintptr_t) {
  throw NotBuilt(
      "the plan for CUDA tensors is not in this build; build with nvcc on PATH and -DFLEXEP_CUDA=ON");
}

template void launch_plan(const CountSlots&, uintptr_t);
template void launch_plan(const ResolveRows&, uintptr_t);
template void launch_plan(const AssignRows&, uintptr_t);
template void launch_plan(const PackMeta&, uintptr_t);
template void launch_plan(const InvertRows&, uintptr_t);
template void launch_plan(const CompactRows&, uintptr_t);

}  // namespace flexep
#endif
