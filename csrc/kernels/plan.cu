#include "kernels/plan.h"

#include "base/cuda_check.h"

namespace flexep {
namespace {

struct Cta {
  __device__ int rank() const { return static_cast<int>(threadIdx.x); }
  __device__ int size() const { return static_cast<int>(blockDim.x); }
  __device__ void sync() const { __syncthreads(); }
};

template <class Step>
__global__ void __launch_bounds__(kPlanLanes) plan_step(const Step step) {
  step(Cta{});
}

}  // namespace

template <class Step>
void launch_plan(const Step& step, uintptr_t stream) {
  plan_step<<<1, kPlanLanes, 0, reinterpret_cast<cudaStream_t>(stream)>>>(step);
  cuda_check(cudaGetLastError(), "plan step launch");
}

template void launch_plan(const CountSlots&, uintptr_t);
template void launch_plan(const ResolveRows&, uintptr_t);
template void launch_plan(const AssignRows&, uintptr_t);
template void launch_plan(const PackMeta&, uintptr_t);
template void launch_plan(const InvertRows&, uintptr_t);
template void launch_plan(const CompactRows&, uintptr_t);

}  // namespace flexep
