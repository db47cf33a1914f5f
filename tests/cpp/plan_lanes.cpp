// The plan's text over a team of threads must write what it writes over one lane, for any number of lanes: this is
// how a CTA runs it. Random worlds; prints the first difference and exits 1. Under TSan it also shows missing syncs.
#include <barrier>
#include <cstdint>
#include <cstdio>
#include <random>
#include <thread>
#include <vector>

#include "plan/assign.h"
#include "plan/counts.h"
#include "plan/receive.h"
#include "plan/resolve.h"

namespace {

using flexep::Solo;
using Ints = std::vector<int32_t>;

struct Threads {
  int lane, lanes;
  std::barrier<>* meet;
  int rank() const { return lane; }
  int size() const { return lanes; }
  void sync() const { meet->arrive_and_wait(); }
};

template <class Step>
void run(const Step& step, int lanes) {
  if (lanes == 1) return step(Solo{});
  std::barrier<> meet(lanes);
  std::vector<std::jthread> threads;
  for (int lane = 0; lane < lanes; ++lane)
    threads.emplace_back([&, lane] { step(Threads{lane, lanes, &meet}); });
}

constexpr int32_t kPoison = -77;

struct World {
  int ranks, experts, top_k, alignment, capacity;
  std::vector<int> tokens;
  std::vector<Ints> topk_idx;
  Ints place_of_expert, rank_of_place, rank_begin;

  explicit World(std::mt19937& random) {
    auto upto = [&](int n) { return static_cast<int>(random() % (n + 1)); };
    ranks = 1 + upto(4), experts = 1 + upto(9), top_k = 1 + upto(4), alignment = 1 + upto(3);
    rank_begin.push_back(0);
    for (int r = 0; r < ranks; ++r) {
      const int held = experts / ranks + (r < experts % ranks);
      for (int i = 0; i < held; ++i) rank_of_place.push_back(r);
      rank_begin.push_back(rank_begin.back() + held);
    }
    for (int e = 0; e < experts; ++e) place_of_expert.push_back(e);
    capacity = upto(1) ? -1 : experts * alignment + upto(10);
    for (int r = 0; r < ranks; ++r) {
      tokens.push_back(upto(12));
      Ints idx;
      for (int i = 0; i < tokens[r] * top_k; ++i) idx.push_back(upto(experts) - 1);
      topk_idx.push_back(idx);
    }
  }
  flexep::TableView table() const {
    return {experts, ranks, place_of_expert.data(), rank_of_place.data(), rank_begin.data()};
  }
};

/// Everything the plan writes for a world, in one list.
Ints plan(const World& w, int lanes) {
  const int R = w.ranks, E = w.experts, K = w.top_k;
  Ints all;
  auto keep = [&](const Ints& v) { all.insert(all.end(), v.begin(), v.end()); };
  Ints counts(R * E, kPoison), rank_tokens(R * R, kPoison);
  for (int s = 0; s < R; ++s) {
    Ints workspace(flexep::CountSlots::workspace_ints(E, R, lanes), kPoison);
    run(flexep::CountSlots{w.topk_idx[s].data(), w.tokens[s], K, w.table(), &counts[s * E],
                           &rank_tokens[s * R], workspace.data()},
        lanes);
  }
  keep(counts), keep(rank_tokens);
  Ints base(R * E, kPoison), start(E, kPoison), kept(E, kPoison), dropped(E, kPoison), cut(R, kPoison);
  std::vector<int64_t> rows(R, kPoison);
  run(flexep::ResolveRows{counts.data(), w.table(), w.alignment, w.capacity, base.data(), start.data(),
                          kept.data(), dropped.data(), cut.data(), rows.data()},
      lanes);
  keep(base), keep(start), keep(kept), keep(dropped), keep(cut), keep(Ints(rows.begin(), rows.end()));
  for (int s = 0; s < R; ++s) {
    const int T = w.tokens[s], S = R * T;
    std::vector<Ints> slots(5, Ints(T * K, kPoison));
    Ints send_token(S, kPoison), send_counts(R, kPoison);
    Ints workspace(flexep::AssignRows::workspace_ints(E, R, lanes), kPoison);
    run(flexep::AssignRows{w.topk_idx[s].data(), T, K, w.table(), &base[s * E], start.data(), cut.data(), T,
                           S, slots[0].data(), slots[1].data(), slots[2].data(), slots[3].data(),
                           slots[4].data(), send_token.data(), send_counts.data(), workspace.data()},
        lanes);
    for (const Ints& v : slots) keep(v);
    keep(send_token), keep(send_counts);
    Ints weights(T * K, 5), meta(S * (1 + 2 * K), kPoison);
    run(flexep::PackMeta{slots[0].data(), slots[2].data(), send_token.data(), weights.data(), true, T, K, S,
                         meta.data()},
        lanes);
    keep(meta);
    Ints source(T, kPoison), compact(T * K, kPoison), lane_ints(lanes, kPoison), inverse(64, kPoison);
    run(flexep::CompactRows{slots[0].data(), slots[1].data(), s % R, T, K, T, source.data(), compact.data(),
                            lane_ints.data()},
        lanes);
    run(flexep::InvertRows{compact.data(), T, K, 64, inverse.data()}, lanes);
    keep(source), keep(compact), keep(inverse);
  }
  return all;
}

}  // namespace

int main() {
  std::mt19937 random(7);
  for (int number = 0; number < 60; ++number) {
    const World world(random);
    const Ints one = plan(world, 1);
    for (int32_t value : one)
      if (value == kPoison) return std::printf("world %d: one lane left a word unwritten\n", number), 1;
    for (int lanes : {2, 3, 7})
      if (plan(world, lanes) != one)
        return std::printf("world %d: %d lanes differ from one\n", number, lanes), 1;
  }
  std::puts("60 worlds, 1, 2, 3 and 7 lanes: equal");
}
