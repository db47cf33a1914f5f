// Rows between two GPUs through csrc/proto/exchange.h by TMA: push, pull out of a ring, pull out of registered rows.
// Both GPUs send and receive at once, and every run is checked bit for bit. Results: docs/decisions/exchange-spike.md
//
//   nvcc -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a -Icsrc bench/spikes/exchange_two_gpus.cu -o exchange
//   ./exchange             correctness and time at 4 to 32 SMs, a replayed graph, a planted missing post
//   ./exchange --shapes    other rings, chunks and teams at 16 SMs
//
// Prints a line of JSON a configuration. Exit code 1 if anything is wrong.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/cuda_check.h"
#include "exchange_kernel.cuh"

#define CHECK(call) ::flexep::cuda_check(call, #call)

namespace flexep {
namespace {

constexpr int kTimed = 30, kWarmUp = 5, kReplays = 120;
constexpr double kPayload = static_cast<double>(kTokens) * kRowBytes;  // bytes each way

struct Gpu {
  cudaStream_t stream;
  cudaEvent_t events[kTimed + 1];
  char *window, *rows, *out;
  SliceState* state;
  int *sources, *destinations, *expected;
  unsigned long long* wrong;
  std::vector<int> source_list,
      destination_list;  // [kTokens]: row of x that token t is; row of out that it gets here
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
  rows.resize(kTokens);
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
      gpu.sources = allocate<int>(2 * kTokens);
      gpu.destinations = allocate<int>(kTokens);
      gpu.expected = allocate<int>(kRows);
      gpu.wrong = allocate<unsigned long long>(1);
      gpu.source_list = random_rows(10 + me), gpu.destination_list = random_rows(20 + me);
      for (auto kernel : {exchange_rows<PlainMem>, exchange_rows<ForgetfulMem>})
        CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    }
    for (int me = 0; me < 2; ++me) upload_lists(me);
  }

  /// Empty windows, as after a new agreement of both.
  void renew() {
    for (int me = 0; me < 2; ++me) {
      CHECK(cudaSetDevice(me));
      CHECK(cudaMemset(gpus[me].window, 0, kWindowBytes));
      CHECK(cudaMemset(gpus[me].state, 0, kMaxSlices * sizeof(SliceState)));
      CHECK(cudaMemset(gpus[me].wrong, 0, sizeof *gpus[me].wrong));
    }
    wait();
  }

  Job job(const Shape& shape, int me) const {
    const Gpu& gpu = gpus[me];
    return {shape,     shape.slice(), {gpus[0].window, gpus[1].window},     {gpus[0].rows, gpus[1].rows},
            gpu.state, gpu.out,       {gpu.sources, gpu.sources + kTokens}, gpu.destinations,
            me};
  }

  template <class Mem = PlainMem>
  void launch(const Shape& shape, int me) {
    CHECK(cudaSetDevice(me));
    const int threads = 2 * shape.warps * 32;
    exchange_rows<Mem><<<shape.ctas, threads, kSharedBytes, gpus[me].stream>>>(job(shape, me));
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

  /// Teams whose last operation did not end well.
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
  void upload_lists(int me) {
    CHECK(cudaSetDevice(me));
    const Gpu &gpu = gpus[me], &peer = gpus[1 - me];
    std::vector<int> both, expected(kRows, -1);
    for (const Gpu& each : gpus) both.insert(both.end(), each.source_list.begin(), each.source_list.end());
    for (int t = 0; t < kTokens; ++t) expected[gpu.destination_list[t]] = peer.source_list[t];
    upload(gpu.sources, both);
    upload(gpu.destinations, gpu.destination_list);
    upload(gpu.expected, expected);
  }
};

/// What does best at 16 SMs (`--shapes`).
Shape shape_of(Mode mode, int ctas) {
  if (mode == kPush) return {mode, ctas, 2, false, false, {4, 4}, {2, 3}, 256, 4, 2, true, false};
  if (mode == kPullRing) return {mode, ctas, 2, true, false, {4, 4}, {2, 3}, 256, 4, 1, true, false};
  return {mode, ctas, 4, false, false, {0, 4}, {0, 3}, 256, 4, 0, false, false};
}

void print_shape(const Shape& s) {
  std::printf("{\"mode\": \"%s\", \"sms\": %d, \"roles\": \"%s\", \"team\": \"%s\", \"warps\": %d, ",
              kModeNames[s.mode], s.ctas, s.split ? "apart" : "together", s.cta_teams ? "cta" : "warp",
              s.role_warps());
  std::printf("\"stages\": [%d, %d], \"held\": [%d, %d], \"chunk\": %d, \"slots\": %d, \"late\": %d, ",
              s.stages[0], s.stages[1], s.held[0], s.held[1], s.chunk, s.slots, s.late);
  std::printf("\"look\": %d, \"settles\": %d, \"ring_mb\": %.1f", s.look, s.settles,
              1e-6 * s.slots * s.chunk * kRowBytes * (s.mode != kPullRegistered));
}

/// Checks `epochs` operations with changing rows, then times. Returns whether all was right.
bool run(Pair& pair, const Shape& shape, int epochs, double copy_gbps) {
  if (!shape.fits()) throw Error("a shape does not fit");
  pair.renew();
  unsigned long long wrong = 0;
  for (int epoch = 1; epoch <= epochs; ++epoch) {
    pair.prepare(epoch);
    for (int me = 0; me < 2; ++me) pair.launch(shape, me);
    pair.wait();
    wrong = pair.check(epoch);
  }
  int failed = pair.failed(shape);
  const double us = failed ? 0 : pair.time([&](int me) { pair.launch(shape, me); });
  failed += pair.failed(shape);
  const double gbps = failed ? 0 : kPayload / us * 1e-3;
  print_shape(shape);
  std::printf(
      ", \"epochs\": %d, \"wrong_words\": %llu, \"failed_teams\": %d, \"us\": %.1f, \"gbps\": %.1f, "
      "\"of_copy_engine\": %.3f}\n",
      epochs, wrong, failed, us, gbps, gbps / copy_gbps);
  return wrong == 0 && failed == 0;
}

/// One graph with the kernels of both GPUs, replayed with rows that change in between.
bool replay(Pair& pair, const Shape& shape, double copy_gbps) {
  pair.renew();
  Gpu *a = &pair.gpus[0], *b = &pair.gpus[1];
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK(cudaSetDevice(0));
  CHECK(cudaStreamBeginCapture(a->stream, cudaStreamCaptureModeGlobal));
  CHECK(cudaEventRecord(a->events[0], a->stream));
  CHECK(cudaStreamWaitEvent(b->stream, a->events[0]));
  for (int me = 0; me < 2; ++me) pair.launch(shape, me);
  CHECK(cudaEventRecord(b->events[0], b->stream));
  CHECK(cudaStreamWaitEvent(a->stream, b->events[0]));
  CHECK(cudaStreamEndCapture(a->stream, &graph));
  CHECK(cudaSetDevice(0));
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  unsigned long long wrong = 0;
  int failed = 0;
  std::vector<float> each(kReplays);
  for (int i = 0; i < kReplays; ++i) {
    pair.prepare(1000 + i);
    CHECK(cudaSetDevice(0));
    CHECK(cudaEventRecord(a->events[1], a->stream));
    CHECK(cudaGraphLaunch(exec, a->stream));
    CHECK(cudaEventRecord(a->events[2], a->stream));
    pair.wait();
    CHECK(cudaEventElapsedTime(&each[i], a->events[1], a->events[2]));
    wrong = pair.check(1000 + i);
    if ((failed = pair.failed(shape)) > 0) break;
  }
  const unsigned long long epoch = pair.states(0)[0].epoch[kReader];
  CHECK(cudaGraphExecDestroy(exec));
  CHECK(cudaGraphDestroy(graph));
  const double us = median(each) * 1e3;
  print_shape(shape);
  std::printf(
      ", \"graph_replays\": %d, \"epoch\": %llu, \"wrong_words\": %llu, \"failed_teams\": %d, \"us\": %.1f, "
      "\"gbps\": %.1f, \"of_copy_engine\": %.3f}\n",
      kReplays, epoch, wrong, failed, us, kPayload / us * 1e-3, kPayload / us * 1e-3 / copy_gbps);
  return wrong == 0 && failed == 0 && epoch == kReplays;
}

/// Slice 0 of GPU 0 stops posting after two chunks. GPU 1 must give up after its deadline of 50 ms and say so to GPU 0,
/// whose deadline is far away; everybody else finishes. New windows then work.
bool miss_a_post(Pair& pair, Shape shape, double copy_gbps) {
  pair.renew();
  pair.prepare(1);
  shape.seconds[0] = 5, shape.seconds[1] = 0.05;
  CHECK(cudaSetDevice(1));
  CHECK(cudaEventRecord(pair.gpus[1].events[0], pair.gpus[1].stream));
  for (int me = 0; me < 2; ++me) pair.launch<ForgetfulMem>(shape, me);
  CHECK(cudaEventRecord(pair.gpus[1].events[1], pair.gpus[1].stream));
  pair.wait();
  float milliseconds = 0;
  CHECK(cudaEventElapsedTime(&milliseconds, pair.gpus[1].events[0], pair.gpus[1].events[1]));
  const auto writer = static_cast<Status>(pair.states(0)[0].status[kWriter]);
  const auto reader = static_cast<Status>(pair.states(1)[0].status[kReader]);
  FaultRecord told, own;  // as GPU 0 was told, as GPU 1 keeps it
  const WindowLayout layout = shape.slice();
  CHECK(cudaMemcpy(&told, pair.gpus[0].window + layout.faults.of(1), sizeof told, cudaMemcpyDeviceToHost));
  CHECK(cudaMemcpy(&own, pair.gpus[1].window + layout.faults.of(1), sizeof own, cudaMemcpyDeviceToHost));
  const auto word = static_cast<int>(ready_word(shape.mode == kPush ? Channel::push : Channel::pull));
  bool record = true;
  for (const FaultRecord& f : {told, own})
    record &= f.epoch == 1 && f.op == kOp && f.status == static_cast<int>(Status::expired) && f.waiter == 1 &&
              f.awaited == 0 && f.word == word && f.want == make_signal(1, 3, kOp) &&
              f.got == make_signal(1, 2, kOp);
  const int failed = pair.failed(shape);
  const bool right = record && writer == Status::stopped && reader == Status::expired && failed == 2 &&
                     milliseconds > 49 && milliseconds < 500;
  std::printf(
      "{\"mode\": \"%s\", \"missing_post\": true, \"reader\": %d, \"writer\": %d, \"failed_teams\": %d, "
      "\"record\": %s, \"want\": [%llu, %d], \"got\": [%llu, %d], \"ms\": %.1f, \"right\": %s}\n",
      kModeNames[shape.mode], static_cast<int>(reader), static_cast<int>(writer), failed,
      record ? "true" : "false", static_cast<unsigned long long>(epoch_of(own.want)), chunks_of(own.want),
      static_cast<unsigned long long>(epoch_of(own.got)), chunks_of(own.got), milliseconds,
      right ? "true" : "false");
  return run(pair, shape_of(shape.mode, shape.ctas), 1, copy_gbps) && right;
}

double copy_engine(Pair& pair) {
  const double us = pair.time([&](int me) {
    CHECK(cudaSetDevice(me));
    CHECK(cudaMemcpyPeerAsync(pair.gpus[1 - me].out, 1 - me, pair.gpus[me].rows, me,
                              static_cast<std::size_t>(kPayload), pair.gpus[me].stream));
  });
  std::printf("{\"mode\": \"copy_engine\", \"us\": %.1f, \"gbps\": %.1f}\n", us, kPayload / us * 1e-3);
  return kPayload / us * 1e-3;
}

bool run_shapes(Pair& pair, double copy_gbps) {
  bool right = true;
  struct Rings {
    int warps, stages[2], held[2];
  };
  const Rings rings[] = {{4, {2, 2}, {2, 2}}, {4, {2, 2}, {1, 2}}, {4, {1, 3}, {1, 3}}, {4, {1, 3}, {1, 2}},
                         {2, {4, 4}, {2, 3}}, {2, {3, 5}, {2, 4}}, {4, {2, 2}, {2, 1}}};
  const int chunks[][2] = {{64, 16}, {128, 8}, {256, 4}, {512, 2}, {256, 8}};
  for (const auto& [chunk, slots] : chunks)
    for (const Rings& r : rings)
      for (const Mode mode : {kPush, kPullRing})
        for (int bits = 0; bits < 24; ++bits) {
          const bool look = bits & 1, settles = bits & 2, split = bits & 4;
          const int late = bits >> 3;
          if (split && r.stages[0] != r.stages[1]) continue;
          right &= run(pair,
                       {mode,
                        16,
                        r.warps,
                        split,
                        false,
                        {r.stages[0], r.stages[1]},
                        {r.held[0], r.held[1]},
                        chunk,
                        slots,
                        late,
                        look,
                        settles},
                       2, copy_gbps);
        }
  for (const auto& [chunk, slots] : chunks)
    for (const Mode mode : {kPush, kPullRing})
      for (const int late : {0, 2})
        right &= run(pair, {mode, 16, 4, false, true, {2, 2}, {2, 2}, chunk, slots, late, false, late == 0},
                     2, copy_gbps);
  return right;
}

bool run_all(Pair& pair, double copy_gbps) {
  bool right = true;
  pair.renew();
  pair.prepare(1);
  const auto untouched = pair.check(1);  // before anything moved every row must count as wrong
  std::printf("{\"mode\": \"nothing\", \"wrong_words\": %llu}\n", untouched);
  right &= untouched == 2ull * kTokens * kRowWords;
  const Mode modes[] = {kPush, kPullRing, kPullRegistered};
  for (const Mode mode : modes)
    for (const int sms : {4, 8, 16, 32}) right &= run(pair, shape_of(mode, sms), 5, copy_gbps);
  for (const Mode mode : modes) right &= replay(pair, shape_of(mode, 16), copy_gbps);
  for (const Mode mode : {kPush, kPullRing}) right &= miss_a_post(pair, shape_of(mode, 16), copy_gbps);
  return right;
}

}  // namespace
}  // namespace flexep

int main(int argc, char** argv) {
  setenv("CUDA_MODULE_LOADING", "EAGER",
         1);  // a first launch must not wait for a kernel that waits for its peer
  setvbuf(stdout, nullptr, _IOLBF, 0);
  try {
    flexep::Pair pair;
    const double copy_gbps = flexep::copy_engine(pair);
    const bool shapes = argc > 1 && std::string(argv[1]) == "--shapes";
    const bool right = shapes ? flexep::run_shapes(pair, copy_gbps) : flexep::run_all(pair, copy_gbps);
    std::printf("{\"all_right\": %s}\n", right ? "true" : "false");
    return right ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
