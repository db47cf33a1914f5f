// Rows between two GPUs through csrc/proto/exchange.h by TMA: push, pull out of a ring, pull out of registered rows.
// Both GPUs send and receive at once, and every run is checked bit for bit. Results: docs/decisions/exchange-spike.md
//
//   nvcc -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a -Icsrc bench/spikes/exchange_two_gpus.cu -o exchange
//   ./exchange             correctness and time at 4 to 32 SMs, a replayed graph, a planted missing post
//   ./exchange --shapes    first tries other rings and chunks at 16 SMs, then does the above with the best
//
// Prints a line of JSON a configuration. Exit code 1 if anything is wrong.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "exchange_pair.cuh"

namespace flexep {
namespace {

constexpr int kReplays = 120, kFewTokens = 4096;

/// GB/s each way.
double rate(int tokens, double us) { return static_cast<double>(tokens) * kRowBytes / us * 1e-3; }

struct CopyEngine {
  double few, many;  // GB/s each way of kFewTokens and of kMaxTokens rows
  double gbps(int tokens) const { return tokens == kFewTokens ? few : many; }
};

/// By mode, what `--shapes` found best at 16 SMs.
using Shapes = std::array<Shape, 3>;
const Shapes kShapes = {{{kPush, 16, false, 2, {4, 4}, {2, 3}, 256, 4, 1},
                         {kPullRing, 16, false, 2, {4, 4}, {3, 3}, 256, 4, 2},
                         {kPullRegistered, 16, false, 4, {0, 4}, {0, 2}, 256, 4, 1}}};

/// The same for other CTAs or tokens; where every mover would have less than a row of a chunk, with larger chunks.
Shape with(Shape shape, int ctas, int tokens = kFewTokens) {
  shape.ctas = ctas, shape.tokens = tokens;
  for (; shape.mover_rows() == 0 && shape.slots > 1; shape.slots /= 2) shape.chunk *= 2;
  return shape;
}

void print_shape(const Shape& s) {
  std::printf("{\"mode\": \"%s\", \"tokens\": %d, \"sms\": %d, \"roles\": \"%s\", \"movers\": %d, ",
              kModeNames[s.mode], s.tokens, s.ctas, s.split ? "apart" : "together", s.role_movers());
  std::printf("\"stages\": [%d, %d], \"held\": [%d, %d], \"late\": %d, ", s.stages[0], s.stages[1], s.held[0],
              s.held[1], s.late);
  std::printf("\"chunk\": %d, \"slots\": %d, \"ring_mb\": %.1f, ", s.chunk, s.slots,
              1e-6 * s.slots * s.chunk * kRowBytes * (s.mode != kPullRegistered));
}

void print_time(const Shape& shape, double us, const CopyEngine& copies) {
  const double gbps = us > 0 ? rate(shape.tokens, us) : 0;
  std::printf("\"us\": %.1f, \"gbps\": %.1f, \"of_copy_engine\": %.3f}\n", us, gbps,
              gbps / copies.gbps(shape.tokens));
}

struct Outcome {
  bool right;
  double us;  // of one operation
};

/// Checks `epochs` operations with changing rows, then times.
Outcome run(Pair& pair, const Shape& shape, int epochs, const CopyEngine& copies) {
  if (!shape.fits()) throw Error("a shape does not fit");
  pair.renew(shape.tokens);
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
  print_shape(shape);
  std::printf("\"epochs\": %d, \"wrong_words\": %llu, \"failed_roles\": %d, ", epochs, wrong, failed);
  print_time(shape, us, copies);
  return {wrong == 0 && failed == 0, us};
}

/// One graph with the kernels of both GPUs, replayed with rows that change in between.
bool replay(Pair& pair, const Shape& shape, const CopyEngine& copies) {
  pair.renew(shape.tokens);
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
  print_shape(shape);
  std::printf("\"graph_replays\": %d, \"epoch\": %llu, \"wrong_words\": %llu, \"failed_roles\": %d, ",
              kReplays, epoch, wrong, failed);
  print_time(shape, median(each) * 1e3, copies);
  return wrong == 0 && failed == 0 && epoch == kReplays;
}

/// Slice 0 of GPU 0 stops posting after two chunks. GPU 1 must give up after its deadline of 50 ms and say so to GPU 0,
/// whose deadline is far away; everybody else finishes. New windows then work.
bool miss_a_post(Pair& pair, const Shape& usual, const CopyEngine& copies) {
  Shape shape = usual;
  pair.renew(shape.tokens);
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
  bool record =
      chunks_of(own.want) == chunks_of(own.got) + 1;  // all chunks before were posted, singly or together
  for (const FaultRecord& f : {told, own})
    record &= f.epoch == 1 && f.op == kOp && f.status == static_cast<int>(Status::expired) && f.waiter == 1 &&
              f.awaited == 0 && f.word == word && epoch_of(f.want) == 1 && f.want == own.want &&
              f.got == own.got && chunks_of(f.got) <= 2;
  const int failed = pair.failed(shape);
  const bool right = record && writer == Status::stopped && reader == Status::expired && failed == 2 &&
                     milliseconds > 49 && milliseconds < 500;
  std::printf(
      "{\"mode\": \"%s\", \"missing_post\": true, \"reader\": %d, \"writer\": %d, \"failed_roles\": %d, "
      "\"record\": %s, \"want\": [%llu, %d], \"got\": [%llu, %d], \"ms\": %.1f, \"right\": %s}\n",
      kModeNames[shape.mode], static_cast<int>(reader), static_cast<int>(writer), failed,
      record ? "true" : "false", static_cast<unsigned long long>(epoch_of(own.want)), chunks_of(own.want),
      static_cast<unsigned long long>(epoch_of(own.got)), chunks_of(own.got), milliseconds,
      right ? "true" : "false");
  return run(pair, usual, 1, copies).right && right;
}

double copy_engine(Pair& pair, int tokens) {
  const double us = pair.time([&](int me) {
    CHECK(cudaSetDevice(me));
    CHECK(cudaMemcpyPeerAsync(pair.gpus[1 - me].out, 1 - me, pair.gpus[me].rows, me,
                              static_cast<std::size_t>(tokens) * kRowBytes, pair.gpus[me].stream));
  });
  std::printf("{\"mode\": \"copy_engine\", \"tokens\": %d, \"us\": %.1f, \"gbps\": %.1f}\n", tokens, us,
              rate(tokens, us));
  return rate(tokens, us);
}

/// The shapes to try at 16 SMs.
std::vector<Shape> candidates() {
  struct Rings {
    int movers, stages[2], held[2];
  };
  const Rings rings[] = {{4, {2, 2}, {2, 2}}, {4, {2, 2}, {1, 2}}, {4, {1, 3}, {1, 3}}, {4, {1, 3}, {1, 2}},
                         {2, {4, 4}, {2, 3}}, {2, {4, 4}, {3, 3}}, {2, {3, 5}, {2, 4}}, {8, {1, 1}, {1, 1}}};
  const int chunks[][2] = {{64, 8}, {64, 16}, {128, 4}, {128, 8}, {256, 2}, {256, 4}, {512, 2}};
  std::vector<Shape> all;
  for (const auto& [chunk, slots] : chunks)
    for (const Rings& r : rings)
      for (const Mode mode : {kPush, kPullRing})
        for (const bool split : {false, true})
          for (const int late : {1, 2, 4})
            all.push_back({mode,
                           16,
                           split,
                           r.movers,
                           {r.stages[0], r.stages[1]},
                           {r.held[0], r.held[1]},
                           chunk,
                           slots,
                           late});
  for (const int movers : {4, 8})
    for (int held = 1; held <= 16 / movers; ++held)
      all.push_back({kPullRegistered, 16, false, movers, {0, 16 / movers}, {0, held}, 256, 4, 1});
  std::erase_if(all, [](const Shape& shape) { return !shape.fits(); });
  return all;
}

bool find_shapes(Pair& pair, const CopyEngine& copies, Shapes& best) {
  bool right = true;
  std::array<double, 3> least = {1e9, 1e9, 1e9};
  for (const Shape& shape : candidates()) {
    const Outcome outcome = run(pair, shape, 2, copies);
    right &= outcome.right;
    if (outcome.right && outcome.us < least[shape.mode])
      least[shape.mode] = outcome.us, best[shape.mode] = shape;
  }
  return right;
}

bool run_all(Pair& pair, const CopyEngine& copies, const Shapes& shapes) {
  pair.renew(kFewTokens);
  pair.prepare(1);
  const auto untouched = pair.check(1);  // before anything moved every row must count as wrong
  std::printf("{\"mode\": \"nothing\", \"wrong_words\": %llu}\n", untouched);
  bool right = untouched == 2ull * kFewTokens * kRowWords;
  for (const Shape& shape : shapes)
    for (const int sms : {4, 8, 16, 32}) right &= run(pair, with(shape, sms), 5, copies).right;
  for (const Shape& shape : shapes) right &= run(pair, with(shape, 16, kMaxTokens), 5, copies).right;
  for (const Shape& shape : shapes) right &= replay(pair, shape, copies);
  for (const Mode mode : {kPush, kPullRing}) right &= miss_a_post(pair, shapes[mode], copies);
  return right;
}

bool run_program(bool tries_shapes) {
  Pair pair;
  const double few = copy_engine(pair, kFewTokens);
  const CopyEngine copies{few, copy_engine(pair, kMaxTokens)};
  Shapes shapes = kShapes;
  bool right = !tries_shapes || find_shapes(pair, copies, shapes);
  right &= run_all(pair, copies, shapes);
  std::printf("{\"all_right\": %s}\n", right ? "true" : "false");
  return right;
}

}  // namespace
}  // namespace flexep

int main(int argc, char** argv) {
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);  // no first launch may wait for a kernel that waits for its peer
  setvbuf(stdout, nullptr, _IOLBF, 0);
  try {
    return flexep::run_program(argc > 1 && std::string(argv[1]) == "--shapes") ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
