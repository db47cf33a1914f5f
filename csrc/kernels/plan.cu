#include "kernels/plan.h"

#include "base/cuda_check.h"
#include "kernels/cta_block.cuh"

namespace flexep {
namespace {

/// Shared memory on the chip, so that the compiler knows what it is; see spilled_phase.
template <class Step, int kPhase>
__global__ void __launch_bounds__(kPlanLanes, 1) plan_phase(const Step step) {
  extern __shared__ int32_t on_chip[];
  // Earlier kernels of the stream are done and their writes are seen: this one may have been started before.
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  step.template phase<kPhase>(CtaBlock::of_grid(), on_chip);
}

/// `spill`: ints in global memory that stand in for shared ones, `each` a block.
template <class Step, int kPhase>
__global__ void __launch_bounds__(kPlanLanes, 1)
    spilled_phase(const Step step, int32_t* spill, int64_t each) {
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  step.template phase<kPhase>(CtaBlock::of_grid(), spill + blockIdx.x * each);
}

template <class Kernel>
void allow_shared(Kernel kernel, int64_t bytes) {
  constexpr int64_t kWithoutAsking = 48 * 1024;
  if (bytes > kWithoutAsking)
    cuda_check(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
        "shared memory of a plan step");
}

/// `early`: may start before the kernel before it has ended, for whose end it waits.
template <class Step, int kPhase = 0>
void launch_phases(const Step& step, PlanShape shape, cudaStream_t stream, bool early) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(shape.blocks);
  config.blockDim = static_cast<unsigned>(shape.lanes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early;
  const int64_t spilled = spilled_ints(step, shape.lanes);
  cudaError_t status = cudaSuccess;
  if (spilled == 0) {
    config.dynamicSmemBytes = sizeof(int32_t) * step.shared_ints(shape.lanes / kWarp, shape.lanes);
    allow_shared(plan_phase<Step, kPhase>, static_cast<int64_t>(config.dynamicSmemBytes));
    status = cudaLaunchKernelEx(&config, plan_phase<Step, kPhase>, step);
  } else if constexpr (requires { step.workspace; }) {
    int32_t* const spill = step.workspace + step.workspace_ints(shape.blocks);
    status = cudaLaunchKernelEx(&config, spilled_phase<Step, kPhase>, step, spill, spilled);
  }
  cuda_check(status, "plan step launch");
  // The phase before is a kernel of ours, which waits for what came before it.
  if constexpr (kPhase + 1 < Step::kPhases) launch_phases<Step, kPhase + 1>(step, shape, stream, true);
}

}  // namespace

template <class Step>
void launch_plan(const Step& step, PlanShape shape, uintptr_t stream) {
  launch_phases(step, shape, reinterpret_cast<cudaStream_t>(stream), false);
}

#define FLEXEP_LAUNCH(Step) template void launch_plan(const Step&, PlanShape, uintptr_t);
FLEXEP_EACH_PLAN_STEP(FLEXEP_LAUNCH)

}  // namespace flexep
