#include "kernels/plan.h"

#include "base/cuda_check.h"

namespace flexep {
namespace {

/// A CTA as the plan sees it (plan/block.h).
struct CtaBlock {
  __device__ int rank() const { return static_cast<int>(threadIdx.x); }
  __device__ int size() const { return static_cast<int>(blockDim.x); }
  __device__ void sync() const { __syncthreads(); }
  __device__ int block() const { return static_cast<int>(blockIdx.x); }
  __device__ int blocks() const { return static_cast<int>(gridDim.x); }
  __device__ int warp() const { return rank() / kWarp; }
  __device__ int warps() const { return size() / kWarp; }
  __device__ int lane() const { return rank() % kWarp; }
  __device__ int width() const { return kWarp; }
  __device__ void warp_sync() const { __syncwarp(); }
  __device__ uint32_t peers(int32_t key) const { return __match_any_sync(kAll, key); }
  __device__ uint32_t ballot(bool yes) const { return __ballot_sync(kAll, yes); }
  __device__ int64_t warp_sum(int64_t value) const {
    for (int step = kWarp / 2; step; step /= 2) value += __shfl_xor_sync(kAll, value, step);
    return value;
  }
  __device__ int64_t warp_max(int64_t value) const {
    for (int step = kWarp / 2; step; step /= 2) value = max(value, __shfl_xor_sync(kAll, value, step));
    return value;
  }
  __device__ int64_t warp_scan(int64_t value) const {
    int64_t sum = value;
    for (int step = 1; step < kWarp; step *= 2) {
      const int64_t lower = __shfl_up_sync(kAll, sum, step);
      if (lane() >= step) sum += lower;
    }
    return sum - value;
  }

 private:
  static constexpr unsigned kAll = 0xffffffffu;
};

/// Shared memory on the chip, so that the compiler knows what it is; see spilled_phase.
template <class Step, int kPhase>
__global__ void __launch_bounds__(kPlanLanes, 1) plan_phase(const Step step) {
  extern __shared__ int32_t on_chip[];
  // Earlier kernels of the stream are done and their writes are seen: this one may have been started before.
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  step.template phase<kPhase>(CtaBlock{}, on_chip);
}

/// `spill`: ints in global memory that stand in for shared ones, `each` a block.
template <class Step, int kPhase>
__global__ void __launch_bounds__(kPlanLanes, 1)
    spilled_phase(const Step step, int32_t* spill, int64_t each) {
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  step.template phase<kPhase>(CtaBlock{}, spill + blockIdx.x * each);
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
void launch_plan(const Step& step, PlanShape shape, uintptr_t stream, bool behind_ours) {
  launch_phases(step, shape, reinterpret_cast<cudaStream_t>(stream), behind_ours);
}

#define FLEXEP_LAUNCH(Step) template void launch_plan(const Step&, PlanShape, uintptr_t, bool);
FLEXEP_EACH_PLAN_STEP(FLEXEP_LAUNCH)

}  // namespace flexep
