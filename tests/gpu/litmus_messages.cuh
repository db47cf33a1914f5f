// Messages between two SMs: plain stores, a release; an acquire, plain loads. By one thread (CudaMem) and by a warp
// (WarpMem). The reader hands the round back by a right release and acquire, so only the message itself is in question.
#pragma once
#include "litmus_common.cuh"

namespace litmus {

constexpr std::size_t kArrived = 0, kReturned = 256;  // words
constexpr int kLines = 32;
/// Lines lie apart, so that different slices of L2 hold them.
__host__ __device__ constexpr std::size_t line_at(int j) { return 4096 + static_cast<std::size_t>(j) * 4224; }

struct RightMem : CudaMem {
  using CudaMem::CudaMem;
};
/// Planted: the post is no release.
struct RelaxedPost : CudaMem {
  using CudaMem::CudaMem;
  __device__ void post(int to, std::size_t at, Signal signal) const {
    st_relaxed_sys(address(to, at), signal);
  }
};
/// Planted: the load is no acquire.
struct RelaxedLoad : CudaMem {
  __device__ RelaxedLoad(char* const* windows, std::size_t at, int rank, flexep::WindowState& state)
      : CudaMem(windows, at, rank, state), rank_(rank) {}
  __device__ Signal load(std::size_t at) const { return ld_relaxed_sys(address(rank_, at)); }

 private:
  int rank_;
};

template <class Mem>
__global__ void pass_words(char* const* all_windows, flexep::DeviceState* states, int rounds, Tally& tally) {
  if (threadIdx.x != 0) return;
  char* const* const windows = all_windows + (blockIdx.x & ~1u);
  const int me = static_cast<int>(blockIdx.x & 1);
  flexep::WindowState& state = states[blockIdx.x].window;
  const Mem mem(windows, 0, me, state);
  const CudaMem way_back(windows, 0, me, state);
  for (int round = 1; round <= rounds; ++round) {
    if (me == 0) {
      if (!wait_for(tally, [&] { return way_back.load(kReturned) + 1 >= static_cast<Signal>(round); }))
        return;
      for (int j = 0; j < kLines; ++j) {
        const std::uint32_t value = mix(round, j);
        mem.put(1, line_at(j), &value, sizeof value);
      }
      mem.post(1, kArrived, round);
    } else {
      for (int j = 0; j < kLines; ++j) load_plain(mem.view(1, line_at(j), 4));  // an old copy in this SM's L1
      if (!wait_for(tally, [&] { return mem.load(kArrived) >= static_cast<Signal>(round); })) return;
      std::uint32_t got[kLines], sum = 0;
      for (int j = kLines - 1; j >= 0; --j) got[j] = load_plain(mem.view(1, line_at(j), 4));
      for (int j = 0; j < kLines; ++j) sum = fold(sum, got[j]);
      count(tally, sum != expected_fold(round, kLines));
      way_back.post(0, kReturned, round);
    }
  }
}

/// A warp of which every lane writes a word, lane 0 before the others.
struct RightWarp {
  static __device__ void write_then_post(flexep::WarpMem& mem, char* const*, int round, int lane) {
    auto* const word = mem.target(1, line_at(lane), 4);
    if (lane != 0) __nanosleep(500);
    store_plain(word, mix(round, lane));
    mem.post(1, kArrived, round);
  }
};
/// Planted: no __syncwarp before lane 0's release.
struct NoWarpSync {
  static __device__ void write_then_post(flexep::WarpMem&, char* const* windows, int round, int lane) {
    char* const word = windows[1] + line_at(lane);
    if (lane == 0) {
      store_plain(word, mix(round, lane));
      ptx::st_release_sys(windows[1] + kArrived, round);
    } else {
      __nanosleep(500);
      store_plain(word, mix(round, lane));
    }
    __syncwarp();
  }
};
/// Planted: the warp meets, but lane 0's post is no release.
struct RelaxedWarpPost {
  static __device__ void write_then_post(flexep::WarpMem&, char* const* windows, int round, int lane) {
    store_plain(windows[1] + line_at(lane), mix(round, lane));
    __syncwarp();
    if (lane == 0) st_relaxed_sys(windows[1] + kArrived, round);
  }
};

template <class Writer>
__global__ void pass_words_of_a_warp(char* const* all_windows, flexep::DeviceState* states, int rounds,
                                     Tally& tally) {
  char* const* const windows = all_windows + (blockIdx.x & ~1u);
  const int me = static_cast<int>(blockIdx.x & 1), lane = static_cast<int>(threadIdx.x);
  flexep::WarpMem mem(windows, {2, 2}, me, states[blockIdx.x]);
  for (int round = 1; round <= rounds; ++round) {
    if (me == 1)
      for (int j = 0; j < kLines; ++j) load_plain(windows[1] + line_at(j));  // an old copy in this SM's L1
    const std::size_t word = me == 0 ? kReturned : kArrived;
    const auto want = static_cast<Signal>(me == 0 ? round - 1 : round);
    bool here = false, late = false;
    const long long until = clock64() + 1'500'000'000;
    while (!here && !late) {  // the warp looks as one
      here = mem.load(word) >= want;
      late = __shfl_sync(0xffffffffu, clock64() > until, 0);
    }
    if (!here) {
      if (lane == 0) add(tally.late, 1);
      return;
    }
    if (me == 0) {
      Writer::write_then_post(mem, windows, round, lane);
      continue;
    }
    std::uint32_t got[kLines], sum = 0;
    for (int j = kLines - 1; j >= 0; --j) got[j] = load_plain(mem.view(1, line_at(j), 4));
    for (int j = 0; j < kLines; ++j) sum = fold(sum, got[j]);
    const bool wrong = __any_sync(0xffffffffu, sum != expected_fold(round, kLines));
    if (lane == 0) count(tally, wrong);
    mem.post(0, kReturned, round);
  }
}

/// Every thread asks for every word: one alone may find it free.
struct RightExchange {
  static __device__ std::uint32_t take(std::uint32_t* word) { return ptx::exchange_relaxed_gpu(word, 1); }
};
/// Planted: reads, then writes.
struct ReadThenWrite {
  static __device__ std::uint32_t take(std::uint32_t* word) {
    auto* const it = static_cast<volatile std::uint32_t*>(word);
    const std::uint32_t before = *it;
    *it = 1;
    return before;
  }
};

template <class Exchange>
__global__ void take_words(std::uint32_t* words, std::uint32_t* winners, int count) {
  for (int i = 0; i < count; ++i)
    if (Exchange::take(words + i) == 0) atomicAdd(winners + i, 1u);
}
__global__ void judge_winners(const std::uint32_t* winners, int words, Tally& tally) {
  for (int i = static_cast<int>(threadIdx.x); i < words; i += static_cast<int>(blockDim.x))
    count(tally, winners[i] != 1);
}

template <class Exchange>
void take(Tally& tally, int ctas) {
  constexpr int kWords = 4096;
  std::uint32_t* words = nullptr;
  LITMUS_CHECK(cudaMalloc(&words, 2 * kWords * sizeof *words));
  LITMUS_CHECK(cudaMemset(words, 0, 2 * kWords * sizeof *words));
  take_words<Exchange><<<ctas, 64>>>(words, words + kWords, kWords);
  judge_winners<<<1, 256>>>(words + kWords, kWords, tally);
  LITMUS_CHECK(cudaDeviceSynchronize());
  cudaFree(words);
}

inline void run_messages(int pairs_count, int rounds) {
  const Pairs pairs(pairs_count);
  const auto pass = [&](const char* test, const char* variant, auto* kernel) {
    run(test, variant, [&](Tally& tally) {
      pairs.clear();
      alone_on_its_sm(kernel)<<<2 * pairs_count, 32, kOneCtaPerSm>>>(pairs.windows, pairs.states, rounds,
                                                                     tally);
    });
  };
  pass("message", "right", pass_words<RightMem>);
  pass("message", "relaxed-post", pass_words<RelaxedPost>);
  pass("message", "relaxed-load", pass_words<RelaxedLoad>);
  pass("warp-message", "right", pass_words_of_a_warp<RightWarp>);
  pass("warp-message", "no-syncwarp", pass_words_of_a_warp<NoWarpSync>);
  pass("warp-message", "relaxed-post", pass_words_of_a_warp<RelaxedWarpPost>);
  run("exchange", "right", [&](Tally& tally) { take<RightExchange>(tally, 2 * pairs_count); });
  run("exchange", "read-then-write", [&](Tally& tally) { take<ReadThenWrite>(tally, 2 * pairs_count); });
}

}  // namespace litmus
