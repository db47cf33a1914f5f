// The router's text for a warp (ops/route_warp.h, and route_registers.h where it fits), run by 32 lanes on the CPU, must
// write what ops/route_cpu.cpp writes, bit for bit. Lanes are fibers: each runs until it meets the others. Only sync()
// orders memory between lanes, as on a GPU: under TSan every lane is a thread of its own, so a missing sync is a report.
// Prints the first difference, exits 1.
#include <sanitizer/tsan_interface.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "ops/route_registers.h"

namespace {

using namespace flexep;

enum class Meet { none, sync, max, min, vote, sum, swap };

struct Lane {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(128 << 10);
  void* fiber = __tsan_create_fiber(0);
  Meet at = Meet::none;  // what it waits for; none: it has returned
  std::uint32_t word = 0;
  int step = 0;
};

std::vector<Lane> lanes(kWarpLanes);
ucontext_t scheduler;
void* const scheduler_fiber = __tsan_get_current_fiber();
int running = 0;
char started, synced, finished;  // what TSan is told: releases before, acquires after
std::function<void(int)> body;

constexpr unsigned kNoOrder = __tsan_switch_to_fiber_no_sync;

[[gnu::no_sanitize_thread]] std::uint32_t meet(int lane, Meet at, std::uint32_t word) {
  lanes[lane].at = at, lanes[lane].word = word;
  if (at == Meet::sync) __tsan_release(&synced);
  __tsan_switch_to_fiber(scheduler_fiber, kNoOrder);
  swapcontext(&lanes[lane].context, &scheduler);
  if (at == Meet::sync) __tsan_acquire(&synced);
  return lanes[lane].word;
}

struct FiberWarp {
  int lane;
  int rank() const { return lane; }
  void sync() const { meet(lane, Meet::sync, 0); }
  unsigned max(unsigned x) const { return meet(lane, Meet::max, x); }
  unsigned min(unsigned x) const { return meet(lane, Meet::min, x); }
  unsigned swap(unsigned x, int step) const {
    lanes[lane].step = step;
    return meet(lane, Meet::swap, x);
  }
  unsigned from(unsigned x, int other) const { return swap(x, lane ^ other); }
  unsigned vote(bool x) const { return meet(lane, Meet::vote, x); }
  Packet load(const Packet* at) const { return *at; }
  void store(float* at, const Packet& p) const { std::memcpy(at, p.word, sizeof p); }
  float sum(float x) const { return float_of(meet(lane, Meet::sum, bits_of(x))); }
};

[[gnu::no_sanitize_thread]] void exchange() {
  const Meet at = lanes[0].at;
  std::vector<std::uint32_t> words;
  for (const Lane& lane : lanes) {
    if (lane.at != at) std::puts("lanes meet at different places"), std::exit(1);
    words.push_back(lane.word);
  }
  std::uint32_t result = words[0];
  if (at == Meet::vote) {
    result = 0;
    for (int i = 0; i < kWarpLanes; ++i) result |= words[i] << i;
  }
  if (at == Meet::max) result = *std::max_element(words.begin(), words.end());
  if (at == Meet::min) result = *std::min_element(words.begin(), words.end());
  for (int step = kWarpLanes / 2; at == Meet::sum && step > 0; step /= 2) {
    const auto before = words;
    for (int i = 0; i < kWarpLanes; ++i) words[i] = bits_of(float_of(before[i]) + float_of(before[i ^ step]));
  }
  for (int i = 0; i < kWarpLanes; ++i)
    lanes[i].word = at == Meet::sum ? words[i] : at == Meet::swap ? words[i ^ lanes[i].step] : result;
}

[[gnu::no_sanitize_thread]] void enter() {
  const int lane = running;
  __tsan_acquire(&started);
  body(lane);
  __tsan_release(&finished);
  lanes[lane].at = Meet::none;
  __tsan_switch_to_fiber(scheduler_fiber, kNoOrder);
  swapcontext(&lanes[lane].context, &scheduler);
}

/// Runs the 32 lanes to their end, in ascending or descending turns.
[[gnu::no_sanitize_thread]] void run_lanes(bool ascending) {
  for (Lane& lane : lanes) {
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = lane.stack.data(), lane.context.uc_stack.ss_size = lane.stack.size();
    makecontext(&lane.context, enter, 0);
  }
  __tsan_release(&started);
  do {
    for (int i = 0; i < kWarpLanes; ++i) {
      running = ascending ? i : kWarpLanes - 1 - i;
      __tsan_switch_to_fiber(lanes[running].fiber, kNoOrder);
      swapcontext(&scheduler, &lanes[running].context);
    }
    exchange();
  } while (lanes[0].at != Meet::none);
  __tsan_acquire(&finished);
}

struct Problem {
  RouteRule rule;
  DType dtype;
  int tokens, experts;
  bool with_probs, one_row;
  std::vector<float> logits, bias, grad_weights, grad_probs;
  std::vector<std::uint16_t> narrow;
  std::vector<std::uint8_t> padding;

  explicit Problem(std::mt19937& random) {
    auto upto = [&](int n) { return static_cast<int>(random() % (n + 1)); };
    const bool whole = upto(3) == 0;  // groups of 32, 64 ..
    const int some = upto(1) ? 1 : 1 + upto(upto(4) ? 5 : 39), groups = whole ? 1 + upto(7) : some;
    const int size = whole ? kWarpLanes * (1 + upto(kLaneExperts / groups - 1)) : 1 + upto(upto(3) ? 9 : 70);
    tokens = 3, experts = size * groups;
    const int chosen = 1 + upto(groups - 1);
    rule = {static_cast<Score>(upto(3)),
            1 + upto(std::min(chosen * size, kRouteMaxTopK) - 1),
            groups,
            chosen,
            upto(1) == 1,
            upto(1) == 1,
            upto(1) ? 1.0f : 2.5f};
    dtype = upto(2) ? DType::f32 : DType::bf16, with_probs = upto(1), one_row = upto(1);
    std::normal_distribution<float> normal(0.0f, upto(1) ? 2.0f : 30.0f);
    const bool levels = upto(3) == 0, wild = upto(5) == 0;
    auto value = [&] {
      const float inf = std::numeric_limits<float>::infinity(), strange[] = {inf, -inf, inf - inf, -0.0f};
      if (wild && upto(9) == 0) return strange[upto(3)];
      return levels ? static_cast<float>(upto(2)) - 1.0f : normal(random);
    };
    const float crowd = upto(3) ? 0.0f : 9.0f;  // on the experts of one lane
    for (int i = 0; i < tokens * experts; ++i)
      logits.push_back(value() + (i % experts % kWarpLanes == 3 ? crowd : 0.0f));
    for (float x : logits) narrow.push_back(f32_to_bf16(x));
    for (int i = 0; i < experts && rule.num_groups % 2; ++i) bias.push_back(0.3f * normal(random));
    for (int i = 0; i < tokens && upto(1); ++i) padding.assign({0, 1, 0});
    for (int i = 0; i < tokens * rule.top_k && upto(99); ++i) grad_weights.push_back(normal(random));
    if (grad_weights.size() != static_cast<std::size_t>(tokens * rule.top_k)) grad_weights.clear();
    for (int i = 0; with_probs && i < (one_row ? 1 : tokens) * experts; ++i)
      grad_probs.push_back(normal(random));
  }
  const void* at() const {
    return dtype == DType::bf16 ? static_cast<const void*>(narrow.data()) : logits.data();
  }
};

template <class T>
T* or_null(std::vector<T>& v) {
  return v.empty() ? nullptr : v.data();
}

struct Outcome {
  std::vector<std::int32_t> ids;
  std::vector<float> weights, probs, grad;
  std::vector<std::uint16_t> narrow_grad;

  explicit Outcome(const Problem& p)
      : ids(p.tokens * p.rule.top_k, -77),
        weights(ids.size(), -77.0f),
        probs(p.with_probs ? p.tokens * p.experts : 0, -77.0f),
        grad(p.tokens * p.experts, -77.0f),
        narrow_grad(grad.size(), 77) {}

  RouteArgs args(Problem& p) {
    return {p.rule,   p.at(),    p.dtype,    or_null(p.bias), or_null(p.padding),
            p.tokens, p.experts, ids.data(), weights.data(),  or_null(probs)};
  }
  RouteGradArgs grad_args(Problem& p) {
    void* const out = p.dtype == DType::bf16 ? static_cast<void*>(narrow_grad.data()) : grad.data();
    return {p.rule,
            p.at(),
            p.dtype,
            ids.data(),
            or_null(p.grad_weights),
            or_null(p.grad_probs),
            p.one_row ? 0 : p.experts,
            p.tokens,
            p.experts,
            out};
  }
  std::vector<std::uint32_t> words() const {
    std::vector<std::uint32_t> all(ids.begin(), ids.end());
    for (const auto* floats : {&weights, &probs, &grad})
      for (float x : *floats) all.push_back(bits_of(x));
    all.insert(all.end(), narrow_grad.begin(), narrow_grad.end());
    return all;
  }
};

/// By lanes in ascending or descending turns; held: in registers.
template <class Logit>
void by_lanes(Problem& p, Outcome& out, bool ascending, bool held) {
  std::vector<Packet> shared(RouteScratch::words(p.experts, p.rule.num_groups) / 4);
  const auto scratch = RouteScratch::at(reinterpret_cast<std::uint32_t*>(shared.data()), p.experts);
  const RouteArgs args = out.args(p);
  const RouteGradArgs grad_args = out.grad_args(p);
  for (int token = 0; token < p.tokens; ++token) {
    std::uint32_t taken[kRouteMaxTopK];
    body = [&](int lane) {
      if (held)
        route_held<FiberWarp, Logit>({lane}, args, token, taken);
      else
        route_token<FiberWarp, Logit>({lane}, args, token, scratch);
    };
    run_lanes(ascending);
  }
  for (int token = 0; token < p.tokens; ++token) {
    body = [&](int lane) { route_grad_token<FiberWarp, Logit>({lane}, grad_args, token, scratch); };
    run_lanes(ascending);
  }
}

/// Whether the lanes write what the specification does; prints the first difference.
bool agrees(Problem& p, int world, bool held) {
  Outcome one(p), many(p);
  route(one.args(p), 1);
  route_grad(one.grad_args(p), 1);
  if (p.dtype == DType::bf16)
    by_lanes<std::uint16_t>(p, many, world % 2, held);
  else
    by_lanes<float>(p, many, world % 2, held);
  const auto want = one.words(), got = many.words();
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (want[i] == got[i]) continue;
    std::printf("world %d%s, word %zu of %zu (%zu ids): %08x, not %08x; E %d K %d groups %d score %d\n",
                world, held ? " in registers" : "", i, want.size(), one.ids.size(), got[i], want[i],
                p.experts, p.rule.top_k, p.rule.num_groups, static_cast<int>(p.rule.score));
    return false;
  }
  return true;
}

}  // namespace

int main() {
  std::mt19937 random(5);
  int held = 0, grouped = 0;
  for (int world = 0; world < 600; ++world) {
    Problem p(random);
    if (!agrees(p, world, false)) return 1;
    if (!fits_registers(p.rule, p.experts)) continue;
    if (!agrees(p, world, true)) return 1;
    ++held, grouped += p.rule.num_groups > 1;
  }
  if (held < 200 || grouped < 50) return 1;
  std::puts("equal");
}
