// Rows by TMA: global memory -> ring -> a peer's window -> release; acquire -> ring -> folded and stored on. The mbarrier
// of one stage over many phases. And shared memory that a CTA has written itself -> global memory.
#pragma once
#include "litmus_common.cuh"

namespace litmus {

using flexep::Ring;
using flexep::RingLayout;

constexpr int kRowBytes = 8192, kRowWords = kRowBytes / 4, kSources = 61, kRows = 6;  // rows a round
constexpr std::size_t kRowArrived = 0, kRowReturned = 256, kRowsAt = 4096, kSinkAt = 128 * 1024;
static_assert(kSinkAt >= kRowsAt + kRows * kRowBytes && kWindowBytes >= kSinkAt + kRows * kRowBytes);

enum Plant {
  kNone,
  kNoWaitBeforeStore,
  kNoDrain,
  kNoAcquire,
  kRelaxedRowPost,
  kNoProxyFence,
  kNoWaitBeforeFold
};

/// Word `w` of source row `row`.
__host__ __device__ inline std::uint32_t source_word(int row, int w) { return mix(row, w); }
__device__ inline int source_row(int round, int i) { return (round * 7 + i) % kSources; }

__global__ void fill_sources(std::uint32_t* sources) {
  for (int w = static_cast<int>(threadIdx.x); w < kRowWords; w += static_cast<int>(blockDim.x))
    sources[blockIdx.x * kRowWords + w] = source_word(static_cast<int>(blockIdx.x), w);
}

/// Each lane folds every 32nd word from its own, then the lanes' folds are folded in lane order.
template <class Word>
__device__ std::uint32_t fold_row(int lane, Word word) {
  std::uint32_t mine = 0, sum = 0;
  for (int w = lane; w < kRowWords; w += 32) mine = fold(mine, word(w));
  for (int l = 0; l < 32; ++l) sum = fold(sum, __shfl_sync(0xffffffffu, mine, l));
  return sum;
}
__device__ inline std::uint32_t fold_shared(int lane, const char* row) {
  const auto* const words = reinterpret_cast<const volatile std::uint32_t*>(row);
  return fold_row(lane, [&](int w) { return words[w]; });
}
__global__ void fold_sources(std::uint32_t* folds) {
  const int row = static_cast<int>(blockIdx.x), lane = static_cast<int>(threadIdx.x);
  const std::uint32_t sum = fold_row(lane, [&](int w) { return source_word(row, w); });
  if (lane == 0) folds[row] = sum;
}

/// A ring whose stages can also be looked at from outside, for plants.
struct Seen {
  RingLayout layout;
  char* shared;

  __device__ char* stage(int i) const {
    return shared + layout.rows.at + i % layout.stages * layout.stage_bytes;
  }
  __device__ void until_full(int i) const {
    auto* const full = reinterpret_cast<std::uint64_t*>(shared + layout.full.at) + i % layout.stages;
    while (!ptx::mbarrier_try_wait_parity_acquire_cta(full, i / layout.stages & 1)) {
    }
  }
};

/// One row from `from` to `to`; `done` rows went before it since the ring was made.
template <int kPlant>
__device__ void store_oldest(Ring& ring, const Seen& seen, int done, char* to) {
  if constexpr (kPlant == kNoWaitBeforeStore) {
    ring.store(to, kRowBytes);
    seen.until_full(done);  // so that the stage's mbarrier stays in step
  } else {
    ring.wait();
    ring.store(to, kRowBytes);
  }
}

template <int kPlant>
__device__ void send_rows(Ring& ring, const Seen& seen, const char* sources, char* window, int round) {
  const int before = (round - 1) * kRows;
  for (int loaded = 0, stored = 0; stored < kRows;) {
    if (loaded < kRows && loaded - stored < seen.layout.stages) {
      if constexpr (kPlant != kNoAcquire) ring.acquire();
      ring.load(sources + static_cast<std::size_t>(source_row(round, loaded)) * kRowBytes, kRowBytes);
      ++loaded;
    } else {
      store_oldest<kPlant>(ring, seen, before + stored, window + kRowsAt + stored * kRowBytes);
      ++stored;
    }
  }
  if constexpr (kPlant != kNoDrain) ring.drain();
}

/// Fold of the rows that lie in the window, which it also stores to the sink behind them.
template <int kPlant>
__device__ std::uint32_t receive_rows(Ring& ring, const Seen& seen, char* window, int round, int lane) {
  std::uint32_t sum = 0;
  const int before = (round - 1) * kRows;
  for (int i = 0; i < kRows; ++i) {
    ring.acquire();
    ring.load(window + kRowsAt + i * kRowBytes, kRowBytes);
    if constexpr (kPlant == kNoWaitBeforeFold) {
      sum = fold(sum, fold_shared(lane, seen.stage(before + i)));
      ring.wait();
    } else {
      sum = fold(sum, fold_shared(lane, ring.wait()));
    }
    ring.store(window + kSinkAt + i * kRowBytes, kRowBytes);
  }
  ring.drain();
  return sum;
}

/// Lane 0 looks; the warp learns.
template <bool kProxyFence>
__device__ bool arrived(const CudaMem& mem, std::size_t at, Signal want, int lane, Tally& tally) {
  bool here = true;
  if (lane == 0)
    here = wait_for(tally, [&] {
      return (kProxyFence ? mem.load(at) : ptx::ld_acquire_sys(mem.address(1, at))) >= want;
    });
  here = __shfl_sync(0xffffffffu, here, 0);
  __syncwarp();
  return here;
}

/// Whether the sink holds the round's rows too.
__device__ inline bool sink_is_right(const char* window, int round, int lane) {
  bool right = true;
  for (int i = 0; i < kRows; ++i)
    for (int w = lane; w < kRowWords; w += 32)
      right &= load_plain(window + kSinkAt + i * kRowBytes + 4 * w) == source_word(source_row(round, i), w);
  return __all_sync(0xffffffffu, right);
}

template <int kPlant>
__global__ void pass_rows(char* const* all_windows, flexep::DeviceState* states, const char* sources,
                          const std::uint32_t* folds, int stages, int rounds, Tally& tally) {
  extern __shared__ __align__(128) char shared[];
  char* const* const windows = all_windows + (blockIdx.x & ~1u);
  const int me = static_cast<int>(blockIdx.x & 1), lane = static_cast<int>(threadIdx.x);
  const CudaMem mem(windows, 0, me, states[blockIdx.x].window);
  const Seen seen{RingLayout(stages, kRowBytes), shared};
  Ring ring(seen.layout, shared);
  for (int round = 1; round <= rounds; ++round) {
    if (me == 0) {
      if (!arrived<true>(mem, kRowReturned, round - 1, lane, tally)) return;
      send_rows<kPlant>(ring, seen, sources, windows[1], round);
      if (lane == 0) {
        if constexpr (kPlant == kRelaxedRowPost)
          st_relaxed_sys(windows[1] + kRowArrived, round);
        else
          mem.post(1, kRowArrived, round);
      }
      if constexpr (kPlant == kNoDrain) ring.drain();  // by the whole warp, so that rounds stay apart
    } else {
      if (!arrived<kPlant != kNoProxyFence>(mem, kRowArrived, round, lane, tally)) return;
      const std::uint32_t sum = receive_rows<kPlant>(ring, seen, windows[1], round, lane);
      std::uint32_t want = 0;
      for (int i = 0; i < kRows; ++i) want = fold(want, folds[source_row(round, i)]);
      __syncwarp();
      const bool right = sink_is_right(windows[1], round, lane) && sum == want;
      if (lane == 0) {
        count(tally, !right);
        mem.post(0, kRowReturned, round);
      }
    }
  }
}

/// Planted with kFlips false: the parity that is waited for never changes.
template <bool kFlips>
__global__ void flip_phases(const char* sources, const std::uint32_t* folds, int rounds, Tally& tally) {
  extern __shared__ __align__(128) char shared[];
  __shared__ std::uint64_t full;
  const int lane = static_cast<int>(threadIdx.x);
  if (lane == 0) {
    ptx::mbarrier_init(&full, 1);
    ptx::fence_mbarrier_init_release_cluster();
  }
  __syncwarp();
  const auto all_wait = [&](auto done) { return __all_sync(0xffffffffu, wait_for(tally, done)); };
  for (int round = 0; round < rounds; ++round) {
    const int row = source_row(round, static_cast<int>(blockIdx.x));
    if (lane == 0) {
      ptx::mbarrier_arrive_expect_tx_release_cta(&full, kRowBytes);
      ptx::bulk_load(shared, sources + static_cast<std::size_t>(row) * kRowBytes, kRowBytes, &full);
    }
    const auto is_over = [&](int parity) { return ptx::mbarrier_try_wait_parity_acquire_cta(&full, parity); };
    if (!all_wait([&] { return is_over(kFlips ? round & 1 : 1); })) return;
    const std::uint32_t sum = fold_shared(lane, shared);
    if (lane == 0) count(tally, sum != folds[row]);
    if (!all_wait([&] { return is_over(round & 1); })) return;
    __syncwarp();
  }
}

/// All threads write a piece of shared memory, and one of them stores it. Planted with kFence false.
template <bool kFence>
__global__ void store_shared(char* const* windows, int rounds, Tally& tally) {
  extern __shared__ __align__(128) char shared[];
  auto* const words = reinterpret_cast<std::uint32_t*>(shared);
  auto* const there = reinterpret_cast<std::uint32_t*>(windows[blockIdx.x]);
  const auto each_word = [](const auto& visit) {
    for (int w = static_cast<int>(threadIdx.x); w < kRowWords; w += static_cast<int>(blockDim.x)) visit(w);
  };
  for (int round = 1; round <= rounds; ++round) {
    each_word([&](int w) { words[w] = mix(round, w); });
    if constexpr (kFence) ptx::fence_proxy_async_shared_cta();
    __syncthreads();
    if (threadIdx.x == 0) {
      ptx::bulk_store(there, shared, kRowBytes);
      ptx::bulk_commit_group();
      ptx::bulk_wait_group<0>();
      __threadfence();
    }
    __syncthreads();
    bool wrong = false;
    each_word([&](int w) { wrong |= __ldcg(there + w) != mix(round, w); });
    wrong = __syncthreads_or(wrong);
    if (threadIdx.x == 0) count(tally, wrong);
  }
}

inline void run_ring(int pairs_count, int rounds) {
  const Pairs pairs(pairs_count);
  char* sources = nullptr;
  std::uint32_t* folds = nullptr;
  LITMUS_CHECK(cudaMalloc(&sources, kSources * kRowBytes));
  LITMUS_CHECK(cudaMalloc(&folds, kSources * sizeof *folds));
  fill_sources<<<kSources, 256>>>(reinterpret_cast<std::uint32_t*>(sources));
  fold_sources<<<kSources, 32>>>(folds);
  const auto pass = [&](const char* variant, int stages, auto* kernel) {
    run("ring", variant, [&](Tally& tally) {
      pairs.clear();
      alone_on_its_sm(kernel)<<<2 * pairs_count, 32, kOneCtaPerSm>>>(pairs.windows, pairs.states, sources,
                                                                     folds, stages, rounds, tally);
    });
  };
  const char* const right[] = {"right-1-stage", "right-2-stages", "right-3-stages", "right-4-stages"};
  for (int stages = 1; stages <= 4; ++stages) pass(right[stages - 1], stages, pass_rows<kNone>);
  pass("no-wait-before-store", 3, pass_rows<kNoWaitBeforeStore>);
  pass("no-drain-before-post", 3, pass_rows<kNoDrain>);
  pass("no-acquire-before-load", 1, pass_rows<kNoAcquire>);
  pass("relaxed-post", 3, pass_rows<kRelaxedRowPost>);
  pass("no-proxy-fence", 3, pass_rows<kNoProxyFence>);
  pass("no-wait-before-fold", 3, pass_rows<kNoWaitBeforeFold>);
  const auto phases = [&](const char* variant, auto* kernel) {
    run("mbarrier", variant, [&](Tally& tally) {
      alone_on_its_sm(kernel)<<<2 * pairs_count, 32, kOneCtaPerSm>>>(sources, folds, rounds, tally);
    });
  };
  phases("right", flip_phases<true>);
  phases("parity-never-flips", flip_phases<false>);
  const auto store = [&](const char* variant, auto* kernel) {
    run("shared-store", variant, [&](Tally& tally) {
      alone_on_its_sm(kernel)<<<2 * pairs_count, 256, kOneCtaPerSm>>>(pairs.windows, rounds, tally);
    });
  };
  store("right", store_shared<true>);
  store("no-proxy-fence", store_shared<false>);
  cudaFree(sources);
  cudaFree(folds);
}

}  // namespace litmus
