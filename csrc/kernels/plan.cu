#include "kernels/plan.h"

#include <cooperative_groups.h>

#include <algorithm>
#include <map>
#include <mutex>

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

/// All phases: between two, the blocks of the cluster meet, and see what each has written.
template <class Step, int kPhase = 0>
__device__ __forceinline__ void run_phases(const Step& step, int32_t* on_chip) {
  step.template phase<kPhase>(CtaBlock{}, on_chip);
  if constexpr (kPhase + 1 < Step::kPhases) {
    cooperative_groups::this_cluster().sync();
    run_phases<Step, kPhase + 1>(step, on_chip);
  }
}
template <class Step>
__global__ void __launch_bounds__(kClusterLanes, 1) clustered_phases(const Step step) {
  extern __shared__ int32_t on_chip[];
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  run_phases(step, on_chip);
}

template <class Kernel>
void allow_shared(Kernel kernel, int64_t bytes) {
  constexpr int64_t kWithoutAsking = 48 * 1024;
  if (bytes > kWithoutAsking)
    cuda_check(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
        "shared memory of a plan step");
}

/// How a kernel of the plan is launched; the attributes that it has are behind `config`.
struct Launch {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};

  Launch(PlanShape shape, cudaStream_t stream, int64_t shared_ints) {
    config.gridDim = static_cast<unsigned>(shape.blocks);
    config.blockDim = static_cast<unsigned>(shape.lanes);
    config.stream = stream;
    config.dynamicSmemBytes = sizeof(int32_t) * static_cast<size_t>(shared_ints);
    config.attrs = attributes;
  }
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  /// May start before the kernel before it has ended, for whose end it waits.
  void start_early() {
    cudaLaunchAttribute& early = attributes[config.numAttrs++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  void make_cluster() {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {config.gridDim.x, 1, 1};
  }
};

/// Whether the current GPU, or the part of it that this process has, can hold the largest cluster of such a step.
template <class Step>
bool find_room_for_cluster() {
  const auto kernel = clustered_phases<Step>;
  cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
             "the cluster of a plan step");
  allow_shared(kernel, kSharedInts * static_cast<int64_t>(sizeof(int32_t)));
  Launch largest({kClusterBlocks, kClusterLanes}, nullptr, kSharedInts);
  largest.make_cluster();
  int clusters = 0;
  const cudaError_t status = cudaOccupancyMaxActiveClusters(&clusters, kernel, &largest.config);
  if (status != cudaSuccess) cudaGetLastError();  // not this GPU: nothing has failed
  return status == cudaSuccess && clusters > 0;
}

/// The same, asked once a GPU.
template <class Step>
bool has_room_for_cluster() {
  static std::mutex asking;
  static std::map<int, bool> known;
  int device = 0;
  cuda_check(cudaGetDevice(&device), "the current GPU");
  const std::lock_guard<std::mutex> alone(asking);
  const auto found = known.find(device);
  return found != known.end() ? found->second : known[device] = find_room_for_cluster<Step>();
}

template <class Step, int kPhase = 0>
void launch_phases(const Step& step, PlanShape shape, cudaStream_t stream, bool early) {
  const int64_t spilled = spilled_ints(step, shape.lanes);
  const int64_t shared_ints = spilled > 0 ? 0 : step.shared_ints(shape.lanes / kWarp, shape.lanes);
  Launch launch(shape, stream, shared_ints);
  if (early) launch.start_early();
  cudaError_t status = cudaSuccess;
  if (spilled == 0) {
    allow_shared(plan_phase<Step, kPhase>, static_cast<int64_t>(launch.config.dynamicSmemBytes));
    status = cudaLaunchKernelEx(&launch.config, plan_phase<Step, kPhase>, step);
  } else if constexpr (requires { step.workspace; }) {
    int32_t* const spill = step.workspace + step.workspace_ints(shape.blocks);
    status = cudaLaunchKernelEx(&launch.config, spilled_phase<Step, kPhase>, step, spill, spilled);
  }
  cuda_check(status, "plan step launch");
  // The phase before is a kernel of ours, which waits for what came before it.
  if constexpr (kPhase + 1 < Step::kPhases) launch_phases<Step, kPhase + 1>(step, shape, stream, true);
}

template <class Step>
void launch_cluster(const Step& step, PlanShape shape, cudaStream_t stream, bool early) {
  Launch launch(shape, stream, step.shared_ints(shape.lanes / kWarp, shape.lanes));
  if (early) launch.start_early();
  launch.make_cluster();
  cuda_check(cudaLaunchKernelEx(&launch.config, clustered_phases<Step>, step), "plan step launch");
}

}  // namespace

template <class Step>
void launch_plan(const Step& step, PlanShape shape, uintptr_t stream, bool behind_ours) {
  const auto on = reinterpret_cast<cudaStream_t>(stream);
  if constexpr (std::is_base_of_v<CountSlots, Step> || std::is_base_of_v<AssignRows, Step>) {
    if (shape.cluster && has_room_for_cluster<Step>()) return launch_cluster(step, shape, on, behind_ours);
    shape.lanes = std::min(shape.lanes, kPlanLanes);
  }
  launch_phases(step, shape, on, behind_ours);
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
