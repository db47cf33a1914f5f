// Stands in for plan.cu in a build without nvcc: every entry raises with the option to set.
#if !defined(FLEXEP_WITH_CUDA)
#include "base/error.h"
#include "kernels/plan.h"

namespace flexep {

template <class Step>
void launch_plan(const Step&, PlanShape, uintptr_t, bool) {
  throw NotBuilt(
      "the plan for CUDA tensors is not in this build; build with nvcc on PATH and -DFLEXEP_CUDA=ON");
}

template void launch_plan(const CountSlots&, PlanShape, uintptr_t, bool);
template void launch_plan(const ResolveRows&, PlanShape, uintptr_t, bool);
template void launch_plan(const AssignRows&, PlanShape, uintptr_t, bool);
template void launch_plan(const ResolveAndAssign&, PlanShape, uintptr_t, bool);
template void launch_plan(const PeerCounts&, PlanShape, uintptr_t, bool);
template void launch_plan(const ExpectRows&, PlanShape, uintptr_t, bool);
template void launch_plan(const RelayRecords&, PlanShape, uintptr_t, bool);
template void launch_plan(const ClearRows&, PlanShape, uintptr_t, bool);
template void launch_plan(const ReceiveRows&, PlanShape, uintptr_t, bool);
template void launch_plan(const InvertRows&, PlanShape, uintptr_t, bool);
template void launch_plan(const CompactRows&, PlanShape, uintptr_t, bool);
template void launch_plan(const PlanPermutation&, PlanShape, uintptr_t, bool);
template void launch_plan(const TransposeChunks&, PlanShape, uintptr_t, bool);

}  // namespace flexep
#endif
