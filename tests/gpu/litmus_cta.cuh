// Inside a CTA: CtaWarps and CtaCount. Among the CTAs of a rank: begin_role and end_role.
#pragma once
#include "litmus_common.cuh"

namespace litmus {

constexpr int kWarps = 8;

/// Planted: sync does nothing, broadcast is right.
struct NoSync : flexep::CtaWarps {
  using CtaWarps::CtaWarps;
  __device__ void sync() const {}
};
/// Planted: broadcast without its first or its second __syncthreads, `slow` warps being slow to read.
template <bool kFirst>
struct HalfBroadcast : flexep::CtaWarps {
  __device__ explicit HalfBroadcast(int* said) : CtaWarps(said), said_(said) {}
  __device__ int broadcast(int value) const {
    volatile int* const word = said_;
    if (threadIdx.x == 0) {
      if (!kFirst) __nanosleep(300);
      *word = value;
    }
    if (kFirst) __syncthreads();
    if (threadIdx.x >= 32 && kFirst) __nanosleep(300);
    const int said = *word;
    if (!kFirst) __syncthreads();
    return said;
  }

 private:
  int* said_;
};

template <class Team>
__global__ void meet(int rounds, Tally& tally) {
  __shared__ int said;
  __shared__ volatile std::uint32_t words[kWarps];
  const Team team(&said);
  for (int round = 1; round <= rounds; ++round) {
    const bool mine = round % kWarps == team.rank();  // one warp is slower than the others
    if (mine) __nanosleep(200);
    if (threadIdx.x % 32 == 0) words[team.rank()] = mix(round, team.rank());
    team.sync();
    std::uint32_t sum = 0;
    for (int j = 0; j < kWarps; ++j) sum = fold(sum, words[j]);
    bool wrong = sum != expected_fold(round, kWarps);
    for (int j = 0; j < 2; ++j) {
      const int value = static_cast<int>(mix(round, kWarps + j));
      wrong |= team.broadcast(threadIdx.x == 0 ? value : 0) != value;
    }
    wrong = __syncthreads_or(wrong);
    if (threadIdx.x == 0) count(tally, wrong);
    __syncthreads();
  }
}

struct RightCount : flexep::CtaCount {};
/// Planted: the setter releases nothing, the watcher acquires nothing.
class PlainCount {
 public:
  __device__ void set(int value) { *static_cast<volatile int*>(&value_) = value; }
  __device__ int get() const { return *static_cast<const volatile int*>(&value_); }

 private:
  int value_;
};

/// Planted with kEarly: the count is set before the words are written.
template <class Count, bool kEarly>
__global__ void watch(std::uint32_t* lines, int rounds, Tally& tally) {
  __shared__ Count ready, seen[kWarps];
  __shared__ std::uint32_t near[kWarps];
  std::uint32_t* const far = lines + blockIdx.x * kWarps * 1024;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (threadIdx.x == 0) {
    ready.set(0);
    for (Count& one : seen) one.set(0);
  }
  __syncthreads();
  if (threadIdx.x % 32 != 0) return;
  for (int round = 1; round <= rounds; ++round) {
    if (warp == 0) {
      for (int w = 1; w < kWarps; ++w)
        if (!wait_for(tally, [&] { return seen[w].get() >= round - 1; })) return;
      if (kEarly) ready.set(round);
      for (int j = 0; j < kWarps; ++j) {
        store_plain(far + 1024 * j, mix(round, kWarps + j));
        near[j] = mix(round, j);
      }
      if (!kEarly) ready.set(round);
    } else {
      if (!wait_for(tally, [&] { return ready.get() >= round; })) return;
      std::uint32_t sum = 0;
      for (int j = 0; j < kWarps; ++j) sum = fold(sum, static_cast<volatile std::uint32_t*>(near)[j]);
      for (int j = 0; j < kWarps; ++j) sum = fold(sum, load_plain(far + 1024 * j));
      count(tally, sum != expected_fold(round, 2 * kWarps));
      seen[warp].set(round);
    }
  }
}

// --- roles: launches of kRoles CTAs, judged by a kernel of their own ---------------------------------------------
constexpr int kRoles = 4, kRoleThreads = 64;  // CTAs of a rank

struct Roles {
  flexep::DeviceState state;
  flexep::Moved total;
  std::uint32_t words[kRoles][kRoleThreads];
  unsigned lasts, entered, tried, arrived, fold;
};

struct RightEnd {
  static __device__ bool end(Roles& roles, int role, const flexep::Moved& moved) {
    flexep::add_moved(moved, roles.total);
    return flexep::end_cta(roles.state, role, kRoles);
  }
};
/// Planted: the roles are counted without fences.
struct NoFenceEnd {
  static __device__ bool end(Roles& roles, int role, const flexep::Moved& moved) {
    if (threadIdx.x % 32 == 0)
      atomicAdd(reinterpret_cast<unsigned long long*>(&roles.total.rows), moved.rows);
    __syncthreads();
    if (threadIdx.x != 0) return false;
    ptx::exchange_relaxed_gpu(&roles.state.running[role], 0);
    const bool last = atomicAdd(&roles.state.ended, 1u) + 1 == kRoles;
    if (last) roles.state.ended = 0;
    return last;
  }
};
/// Planted: the roles are counted by a read and a write.
struct RacyEnd {
  static __device__ bool end(Roles& roles, int role, const flexep::Moved& moved) {
    if (threadIdx.x % 32 == 0)
      atomicAdd(reinterpret_cast<unsigned long long*>(&roles.total.rows), moved.rows);
    __syncthreads();
    if (threadIdx.x != 0) return false;
    ptx::exchange_relaxed_gpu(&roles.state.running[role], 0);
    __threadfence();
    auto* const ended = static_cast<volatile std::uint32_t*>(&roles.state.ended);
    const unsigned now = *ended + 1;
    *ended = now;
    __threadfence();
    if (now == kRoles) *ended = 0;
    return now == kRoles;
  }
};

/// All CTAs of the launch are here; false if one never came.
__device__ inline bool start_together(Roles& roles, Tally& tally) {
  __shared__ bool here;
  if (threadIdx.x == 0) {
    atomicAdd(&roles.arrived, 1u);
    here = wait_for(tally, [&] { return *static_cast<volatile unsigned*>(&roles.arrived) >= gridDim.x; });
  }
  __syncthreads();
  return here;
}

template <class End>
__global__ void end_roles(Roles& roles, int round, Tally& tally) {
  __shared__ int said;
  const int role = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  for (int r = 0; r < kRoles; ++r) load_plain(&roles.words[r][thread]);  // an old copy in this SM's L1
  if (!start_together(roles, tally)) return;
  const bool began = flexep::begin_cta(roles.state, role, &said);
  if (thread == 0 && began) atomicAdd(&roles.entered, 1u);
  store_plain(&roles.words[role][thread], mix(round, role * kRoleThreads + thread));
  if (!End::end(roles, role, {1, 0, 0, 0})) return;
  atomicAdd(&roles.lasts, 1u);
  std::uint32_t sum = 0;
  for (int r = 0; r < kRoles; ++r)
    for (int t = 0; t < kRoleThreads; ++t) sum = fold(sum, load_plain(&roles.words[r][t]));
  roles.fold = sum;
}
__global__ void judge_ends(Roles& roles, int round, Tally& tally) {
  bool right = roles.lasts == 1 && roles.entered == kRoles && roles.state.ended == 0;
  right &= roles.total.rows == kRoles * kRoleThreads / 32;
  right &= roles.fold == expected_fold(round, kRoles * kRoleThreads);
  for (int r = 0; r < kRoles; ++r) right &= roles.state.running[r] == 0;
  count(tally, !right);
  roles.state = {}, roles.total = {}, roles.fold = 0;
  roles.lasts = roles.entered = roles.tried = roles.arrived = 0;
}

struct RightBegin {
  static __device__ bool begin(Roles& roles, int* said) { return flexep::begin_cta(roles.state, 0, said); }
};
/// Planted: looks whether the role runs, then says that it does.
struct RacyBegin {
  static __device__ bool begin(Roles& roles, int* said) {
    auto* const running = static_cast<volatile std::uint32_t*>(&roles.state.running[0]);
    if (threadIdx.x == 0) {
      *said = *running == 0;
      *running = 1;
    }
    __syncthreads();
    return *said != 0;
  }
};

/// All CTAs want one role, and who has it keeps it until all have asked.
template <class Begin>
__global__ void begin_one_role(Roles& roles, Tally& tally) {
  __shared__ int said;
  if (!start_together(roles, tally)) return;
  const bool free = Begin::begin(roles, &said);
  if (threadIdx.x != 0) return;
  if (free) atomicAdd(&roles.entered, 1u);
  atomicAdd(&roles.tried, 1u);
  wait_for(tally, [&] { return *static_cast<volatile unsigned*>(&roles.tried) >= gridDim.x; });
}
__global__ void judge_begins(Roles& roles, Tally& tally) {
  count(tally, roles.entered != 1 || roles.state.running[0] != 1);
  roles.state = {};
  roles.entered = roles.tried = roles.arrived = 0;
}

inline void run_cta(int ctas, int rounds) {
  const auto meets = [&](const char* variant, auto* kernel) {
    run("cta-warps", variant, [&](Tally& tally) { kernel<<<ctas, 32 * kWarps>>>(rounds, tally); });
  };
  meets("right", meet<flexep::CtaWarps>);
  meets("no-sync", meet<NoSync>);
  meets("no-first-sync-in-broadcast", meet<HalfBroadcast<false>>);
  meets("no-second-sync-in-broadcast", meet<HalfBroadcast<true>>);

  std::uint32_t* lines = nullptr;
  LITMUS_CHECK(cudaMalloc(&lines, ctas * kWarps * 1024 * sizeof *lines));
  const auto watches = [&](const char* variant, auto* kernel) {
    run("cta-count", variant, [&](Tally& tally) { kernel<<<ctas, 32 * kWarps>>>(lines, rounds, tally); });
  };
  watches("right", watch<RightCount, false>);
  watches("no-release-no-acquire", watch<PlainCount, false>);
  watches("set-before-the-words", watch<RightCount, true>);
  cudaFree(lines);
}

inline void run_roles(int ctas, int launches) {
  Roles* roles = nullptr;
  LITMUS_CHECK(cudaMalloc(&roles, sizeof *roles));
  LITMUS_CHECK(cudaMemset(roles, 0, sizeof *roles));
  const auto ends = [&](const char* variant, auto* kernel) {
    run("end-role", variant, [&](Tally& tally) {
      alone_on_its_sm(kernel);
      for (int round = 1; round <= launches; ++round) {
        kernel<<<kRoles, kRoleThreads, kOneCtaPerSm>>>(*roles, round, tally);
        judge_ends<<<1, 1>>>(*roles, round, tally);
      }
    });
  };
  ends("right", end_roles<RightEnd>);
  ends("no-fences", end_roles<NoFenceEnd>);
  ends("read-then-write", end_roles<RacyEnd>);
  const auto begins = [&](const char* variant, auto* kernel) {
    run("begin-role", variant, [&](Tally& tally) {
      for (int round = 1; round <= launches; ++round) {
        kernel<<<ctas, 32>>>(*roles, tally);
        judge_begins<<<1, 1>>>(*roles, tally);
      }
    });
  };
  begins("right", begin_one_role<RightBegin>);
  begins("read-then-write", begin_one_role<RacyBegin>);
  cudaFree(roles);
}

}  // namespace litmus
