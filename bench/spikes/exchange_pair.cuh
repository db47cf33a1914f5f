// The two GPUs of exchange_two_gpus.cu: their memory, launches, checks and clocks.
#pragma once
#include <algorithm>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#include "base/cuda_check.h"
#include "exchange_check.cuh"

#define CHECK(call) ::flexep::cuda_check(call, #call)

namespace flexep {

constexpr int kTimed = 30, kWarmUp = 5;

struct Gpu {
  cudaStream_t stream;
  cudaEvent_t events[kTimed + 1];
  char *window, *rows, *out;
  SliceState* state;
  int *sources, *destinations, *expected;
  unsigned long long* wrong;
  std::vector<int> source_list,
      destination_list;  // [kMaxTokens]: row of x that token t is; row of out that it gets here
};

template <class T>
T* allocate(std::size_t count) {
  void* at = nullptr;
  CHECK(cudaMalloc(&at, count * sizeof(T)));
  return static_cast<T*>(at);
}

template <class T>
void upload(T* to, const std::vector<T>& from) {
  CHECK(cudaMemcpy(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
}

std::vector<int> random_rows(unsigned seed) {
  std::vector<int> rows(kRows);
  std::iota(rows.begin(), rows.end(), 0);
  std::shuffle(rows.begin(), rows.end(), std::mt19937(seed));
  rows.resize(kMaxTokens);
  return rows;
}

double median(std::vector<float> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

/// Two GPUs and what both need for any shape.
class Pair {
 public:
  static constexpr std::size_t kWindowBytes = std::size_t{1} << 28;

  Pair() {
    for (int me = 0; me < 2; ++me) {
      CHECK(cudaSetDevice(me));
      CHECK(cudaDeviceEnablePeerAccess(1 - me, 0));
      Gpu& gpu = gpus[me];
      CHECK(cudaStreamCreateWithFlags(&gpu.stream, cudaStreamNonBlocking));
      for (auto& event : gpu.events) CHECK(cudaEventCreate(&event));
      gpu.window = allocate<char>(kWindowBytes);
      gpu.rows = allocate<char>(std::size_t{kRows} * kRowBytes);
      gpu.out = allocate<char>(std::size_t{kRows} * kRowBytes);
      gpu.state = allocate<SliceState>(kMaxSlices);
      gpu.sources = allocate<int>(2 * kMaxTokens);
      gpu.destinations = allocate<int>(kMaxTokens);
      gpu.expected = allocate<int>(kRows);
      gpu.wrong = allocate<unsigned long long>(1);
      gpu.source_list = random_rows(10 + me), gpu.destination_list = random_rows(20 + me);
      for (auto kernel : {exchange_rows<PlainMem>, exchange_rows<ForgetfulMem>})
        CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    }
  }

  /// Empty windows, as after a new agreement of both, for operations on so many tokens.
  void renew(int tokens) {
    for (int me = 0; me < 2; ++me) {
      CHECK(cudaSetDevice(me));
      CHECK(cudaMemset(gpus[me].window, 0, kWindowBytes));
      CHECK(cudaMemset(gpus[me].state, 0, kMaxSlices * sizeof(SliceState)));
      CHECK(cudaMemset(gpus[me].wrong, 0, sizeof *gpus[me].wrong));
      upload_lists(me, tokens);
    }
    wait();
  }

  Job job(const Shape& shape, int me) const {
    const Gpu& gpu = gpus[me];
    return {shape,     shape.slice(), {gpus[0].window, gpus[1].window},        {gpus[0].rows, gpus[1].rows},
            gpu.state, gpu.out,       {gpu.sources, gpu.sources + kMaxTokens}, gpu.destinations,
            me};
  }

  template <class Mem = PlainMem>
  void launch(const Shape& shape, int me) {
    CHECK(cudaSetDevice(me));
    exchange_rows<Mem><<<shape.ctas, shape.threads(), kSharedBytes, gpus[me].stream>>>(job(shape, me));
    CHECK(cudaGetLastError());
  }

  void wait() {
    for (int me = 0; me < 2; ++me) {
      CHECK(cudaSetDevice(me));
      CHECK(cudaDeviceSynchronize());
    }
  }

  /// New rows everywhere, and poison where they must arrive.
  void prepare(std::uint32_t seed) {
    for (int me = 0; me < 2; ++me) {
      CHECK(cudaSetDevice(me));
      fill_rows<<<kRows, 256, 0, gpus[me].stream>>>(reinterpret_cast<std::uint64_t*>(gpus[me].rows), seed,
                                                    me);
      CHECK(cudaGetLastError());
      CHECK(cudaMemsetAsync(gpus[me].out, kPoison, std::size_t{kRows} * kRowBytes, gpus[me].stream));
    }
    wait();
  }

  /// Words that are wrong since the last `renew`, on both GPUs, after another check.
  unsigned long long check(std::uint32_t seed) {
    unsigned long long all = 0;
    for (int me = 0; me < 2; ++me) {
      CHECK(cudaSetDevice(me));
      const Gpu& gpu = gpus[me];
      check_rows<<<kRows, 256, 0, gpu.stream>>>(reinterpret_cast<const std::uint64_t*>(gpu.out), gpu.expected,
                                                seed, 1 - me, gpu.wrong);
      CHECK(cudaGetLastError());
      CHECK(cudaStreamSynchronize(gpu.stream));
      unsigned long long wrong = 0;
      CHECK(cudaMemcpy(&wrong, gpu.wrong, sizeof wrong, cudaMemcpyDeviceToHost));
      all += wrong;
    }
    return all;
  }

  std::vector<SliceState> states(int me) const {
    std::vector<SliceState> states(kMaxSlices);
    CHECK(cudaSetDevice(me));
    CHECK(
        cudaMemcpy(states.data(), gpus[me].state, states.size() * sizeof states[0], cudaMemcpyDeviceToHost));
    return states;
  }

  /// Roles of slices whose last operation did not end well.
  int failed(const Shape& shape) const {
    int count = 0;
    for (int me = 0; me < 2; ++me) {
      const auto all = states(me);
      for (int s = 0; s < shape.slices(); ++s) count += (all[s].status[0] != 0) + (all[s].status[1] != 0);
    }
    return count;
  }

  /// Median microseconds between the ends of consecutive `enqueue(me)` on the slower GPU.
  double time(const std::function<void(int)>& enqueue) {
    for (int i = 0; i < kWarmUp; ++i)
      for (int me = 0; me < 2; ++me) enqueue(me);
    for (int i = 0; i <= kTimed; ++i)
      for (int me = 0; me < 2; ++me) {
        if (i > 0) enqueue(me);
        CHECK(cudaSetDevice(me));
        CHECK(cudaEventRecord(gpus[me].events[i], gpus[me].stream));
      }
    wait();
    double slowest = 0;
    for (int me = 0; me < 2; ++me) {
      std::vector<float> each(kTimed);
      for (int i = 0; i < kTimed; ++i)
        CHECK(cudaEventElapsedTime(&each[i], gpus[me].events[i], gpus[me].events[i + 1]));
      slowest = std::max(slowest, median(each) * 1e3);
    }
    return slowest;
  }

  Gpu gpus[2];

 private:
  void upload_lists(int me, int tokens) {
    CHECK(cudaSetDevice(me));
    const Gpu &gpu = gpus[me], &peer = gpus[1 - me];
    std::vector<int> both, expected(kRows, -1);
    for (const Gpu& each : gpus) both.insert(both.end(), each.source_list.begin(), each.source_list.end());
    for (int t = 0; t < tokens; ++t) expected[gpu.destination_list[t]] = peer.source_list[t];
    upload(gpu.sources, both);
    upload(gpu.destinations, gpu.destination_list);
    upload(gpu.expected, expected);
  }
};

}  // namespace flexep
