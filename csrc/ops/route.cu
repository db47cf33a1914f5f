// A warp a token (route_warp.h); tokens share nothing, so the grid decides no bit.
#include <cuda_runtime.h>

#include "base/cuda_check.h"
#include "base/math.h"
#include "ops/route.h"
#include "ops/route_registers.h"
#include "ops/route_warp.h"

namespace flexep {
namespace {

constexpr unsigned kAll = 0xffffffffu;
constexpr int kMostWarps = 8;             // of a CTA
constexpr int kDefaultShared = 48 << 10;  // bytes a CTA may have without asking

struct GpuWarp {
  __device__ int rank() const { return static_cast<int>(threadIdx.x) % kWarpLanes; }
  __device__ void sync() const { __syncwarp(); }
  __device__ unsigned max(unsigned x) const { return __reduce_max_sync(kAll, x); }
  __device__ unsigned min(unsigned x) const { return __reduce_min_sync(kAll, x); }
  __device__ unsigned swap(unsigned x, int step) const { return __shfl_xor_sync(kAll, x, step); }
  __device__ unsigned from(unsigned x, int lane) const { return __shfl_sync(kAll, x, lane); }
  __device__ unsigned vote(bool x) const { return __ballot_sync(kAll, x); }
  __device__ Packet load(const Packet* at) const {
    const uint4 v = __ldg(reinterpret_cast<const uint4*>(at));
    return {v.x, v.y, v.z, v.w};
  }
  __device__ void store(float* at, const Packet& p) const {
    *reinterpret_cast<uint4*>(at) = make_uint4(p.word[0], p.word[1], p.word[2], p.word[3]);
  }
  __device__ float sum(float x) const {
    for (int step = kWarpLanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAll, x, step);
    return x;
  }
};

extern __shared__ Packet shared_packets[];

/// CTAs of an SM that registers must leave room for: many tokens in flight hide the latency of each.
template <class Args>
constexpr int kLeastCtas = 5;
template <>
constexpr int kLeastCtas<RouteArgs> = 6;

template <class Logit>
__device__ void run_token(const RouteArgs& a, std::int64_t token, const RouteScratch& s) {
  route_token<GpuWarp, Logit>(GpuWarp{}, a, token, s);
}

template <class Logit>
__device__ void run_token(const RouteGradArgs& a, std::int64_t token, const RouteScratch& s) {
  route_grad_token<GpuWarp, Logit>(GpuWarp{}, a, token, s);
}

template <class Args, class Logit>
__global__ void __launch_bounds__(kMostWarps* kWarpLanes, kLeastCtas<Args>)
    route_kernel(const Args a, std::int64_t words) {
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * (blockDim.x / kWarpLanes) + warp;
  if (token >= a.tokens) return;
  auto* const mine = reinterpret_cast<std::uint32_t*>(shared_packets) + warp * words;
  run_token<Logit>(a, token, RouteScratch::at(mine, a.experts));
}

constexpr int kHeldWarps = 4;  // of a CTA: small ones leave room for the next sooner

template <class Logit>
__global__ void __launch_bounds__(kHeldWarps* kWarpLanes, 10) route_held_kernel(const RouteArgs a) {
  __shared__ std::uint32_t taken[kHeldWarps][kRouteMaxTopK];
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * kHeldWarps + warp;
  if (token < a.tokens) route_held<GpuWarp, Logit>(GpuWarp{}, a, token, taken[warp]);
}

template <class Args, class Logit>
void launch_as(const Args& a, cudaStream_t stream) {
  const std::int64_t words = RouteScratch::words(a.experts, a.rule.num_groups);
  const std::int64_t bytes = words * static_cast<std::int64_t>(sizeof(std::uint32_t));
  std::int64_t warps = kDefaultShared / bytes;
  warps = warps < 1 ? 1 : warps > kMostWarps ? kMostWarps : warps;
  if (bytes > kDefaultShared)
    cuda_check(cudaFuncSetAttribute(route_kernel<Args, Logit>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(bytes)),
               "router: shared memory for all experts of a token");
  const auto grid = static_cast<unsigned>(ceil_div(a.tokens, warps));
  route_kernel<Args, Logit>
      <<<grid, static_cast<unsigned>(warps * kWarpLanes), warps * bytes, stream>>>(a, words);
  cuda_check(cudaGetLastError(), "router launch");
}

void launch_held(const RouteArgs& a, cudaStream_t stream) {
  const auto grid = static_cast<unsigned>(ceil_div(a.tokens, std::int64_t{kHeldWarps}));
  const auto kernel = a.dtype == DType::bf16 ? route_held_kernel<std::uint16_t> : route_held_kernel<float>;
  kernel<<<grid, kHeldWarps * kWarpLanes, 0, stream>>>(a);
  cuda_check(cudaGetLastError(), "router launch");
}

template <class Args>
void launch(const Args& a, std::uintptr_t stream) {
  if (a.tokens == 0) return;
  if (a.dtype == DType::bf16)
    launch_as<Args, std::uint16_t>(a, reinterpret_cast<cudaStream_t>(stream));
  else
    launch_as<Args, float>(a, reinterpret_cast<cudaStream_t>(stream));
}

}  // namespace

void launch_route(const RouteArgs& args, std::uintptr_t stream) {
  if (args.tokens > 0 && fits_registers(args.rule, args.experts))
    launch_held(args, reinterpret_cast<cudaStream_t>(stream));
  else
    launch(args, stream);
}
void launch_route_grad(const RouteGradArgs& args, std::uintptr_t stream) { launch(args, stream); }

}  // namespace flexep
