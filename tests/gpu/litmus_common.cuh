// What the litmus tests share: bounded waits, words whose value says where and when they were written, and the fold.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "mem/cuda_warps.cuh"
#include "mem/ring.cuh"

namespace litmus {

using flexep::CudaMem;
using flexep::Signal;
namespace ptx = flexep::ptx;

#define LITMUS_CHECK(call)                                              \
  do {                                                                  \
    const cudaError_t status = (call);                                  \
    if (status != cudaSuccess) {                                        \
      std::printf("error %s: %s\n", #call, cudaGetErrorString(status)); \
      std::exit(2);                                                     \
    }                                                                   \
  } while (0)

/// What one variant of a test found. Late: waits that passed their deadline, after which the CTA gives up.
struct Tally {
  unsigned long long rounds = 0, failed = 0, late = 0;
};

__device__ inline void add(unsigned long long& counter, unsigned long long n) { atomicAdd(&counter, n); }

/// One round of one pair or CTA.
__device__ inline void count(Tally& tally, bool failed) {
  add(tally.rounds, 1);
  if (failed) add(tally.failed, 1);
}

/// Looks until `done()` or for about a second; false, and counted, if it never came.
template <class Done>
__device__ bool wait_for(Tally& tally, Done done) {
  constexpr long long kCycles = 1'500'000'000;
  const long long until = clock64() + kCycles;
  while (!done()) {
    if (clock64() > until) {
      add(tally.late, 1);
      return false;
    }
  }
  return true;
}

/// The value of word `j` in round `round`: no two rounds or words are alike.
__host__ __device__ inline std::uint32_t mix(std::uint32_t round, std::uint32_t j) {
  std::uint32_t v = round * 0x9e3779b1u ^ (j + 1) * 0x85ebca77u;
  v ^= v >> 15;
  return v * 0xc2b2ae3du + 1;
}

/// Not commutative: loss, repetition and order all show.
__host__ __device__ inline std::uint32_t fold(std::uint32_t so_far, std::uint32_t value) {
  return so_far * 31 + value;
}

__device__ inline std::uint32_t expected_fold(std::uint32_t round, int words) {
  std::uint32_t sum = 0;
  for (int j = 0; j < words; ++j) sum = fold(sum, mix(round, j));
  return sum;
}

/// Reads that a copy in L1 may answer, in order.
__device__ inline std::uint32_t load_plain(const void* at) {
  std::uint32_t value;
  asm volatile("ld.weak.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
__device__ inline void store_plain(void* at, std::uint32_t value) {
  asm volatile("st.weak.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

// What planted bugs use instead of the release and the acquire.
__device__ inline void st_relaxed_sys(void* word, std::uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
__device__ inline std::uint64_t ld_relaxed_sys(const void* word) {
  std::uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

/// Shared memory that leaves room for one CTA an SM.
constexpr int kOneCtaPerSm = 120 * 1024;
constexpr std::size_t kWindowBytes = 256 * 1024;

/// Windows of the two ranks of each pair, of which CTA 2 p + r is rank r: [2 pairs] addresses, states beside them.
struct Pairs {
  int count = 0;
  char** windows = nullptr;
  flexep::DeviceState* states = nullptr;

  explicit Pairs(int pairs) : count(pairs) {
    LITMUS_CHECK(cudaMalloc(&memory_, 2 * count * kWindowBytes));
    LITMUS_CHECK(cudaMalloc(&windows, 2 * count * sizeof *windows));
    LITMUS_CHECK(cudaMalloc(&states, 2 * count * sizeof *states));
    std::vector<char*> each;
    for (int i = 0; i < 2 * count; ++i) each.push_back(memory_ + i * kWindowBytes);
    LITMUS_CHECK(cudaMemcpy(windows, each.data(), each.size() * sizeof(char*), cudaMemcpyHostToDevice));
  }
  Pairs(const Pairs&) = delete;
  ~Pairs() {
    cudaFree(memory_);
    cudaFree(windows);
    cudaFree(states);
  }
  void clear() const {
    LITMUS_CHECK(cudaMemset(memory_, 0, 2 * count * kWindowBytes));
    LITMUS_CHECK(cudaMemset(states, 0, 2 * count * sizeof *states));
  }

 private:
  char* memory_ = nullptr;
};

/// Runs `launch(tally)` and prints its line of the table.
template <class Launch>
void run(const char* test, const char* variant, Launch launch) {
  Tally* tally = nullptr;
  LITMUS_CHECK(cudaMalloc(&tally, sizeof *tally));
  LITMUS_CHECK(cudaMemset(tally, 0, sizeof *tally));
  launch(*tally);
  LITMUS_CHECK(cudaGetLastError());
  Tally found;
  LITMUS_CHECK(cudaMemcpy(&found, tally, sizeof found, cudaMemcpyDeviceToHost));
  std::printf("%-16s %-28s %12llu %12llu %6llu\n", test, variant, found.rounds, found.failed, found.late);
  std::fflush(stdout);
  cudaFree(tally);
}

template <class Kernel>
Kernel alone_on_its_sm(Kernel kernel) {
  LITMUS_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kOneCtaPerSm));
  return kernel;
}

}  // namespace litmus
