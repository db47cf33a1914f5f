// The plan's text over blocks of warps of threads must write what it writes by one lane, for any shape: this is how a
// grid of CTAs runs it. Random worlds; prints the first difference and exits 1. Under TSan it also shows missing syncs.
#include <algorithm>
#include <barrier>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <random>
#include <thread>
#include <vector>

#include "plan/assign.h"
#include "plan/counts.h"
#include "plan/permutation.h"
#include "plan/receive.h"
#include "plan/resolve.h"
#include "plan/transpose.h"

namespace {

using Ints = std::vector<int32_t>;
constexpr int32_t kPoison = -77;

struct Shape {
  int blocks, warps, width;
  int lanes() const { return warps * width; }
};
constexpr Shape kOne{1, 1, 1};

/// What the lanes of a warp show each other.
struct WarpMeeting {
  explicit WarpMeeting(int width) : barrier(width) {}
  std::barrier<> barrier;
  int64_t shown[32];
};

struct ThreadBlock {
  Shape shape;
  int block_rank, lane_of_block;
  std::barrier<>* meet;
  WarpMeeting* warp_meet;

  int rank() const { return lane_of_block; }
  int size() const { return shape.lanes(); }
  void sync() const { meet->arrive_and_wait(); }
  int block() const { return block_rank; }
  int blocks() const { return shape.blocks; }
  int warp() const { return lane_of_block / shape.width; }
  int warps() const { return shape.warps; }
  int lane() const { return lane_of_block % shape.width; }
  int width() const { return shape.width; }
  void warp_sync() const { warp_meet->barrier.arrive_and_wait(); }
  uint32_t peers(int32_t key) const {
    return over_lanes<uint32_t>(
        key, [&](uint32_t mask, int lane, int64_t shown) { return mask | (shown == key ? 1u << lane : 0); });
  }
  uint32_t ballot(bool yes) const {
    return over_lanes<uint32_t>(
        yes, [](uint32_t mask, int lane, int64_t shown) { return mask | (shown ? 1u << lane : 0); });
  }
  int64_t warp_sum(int64_t value) const {
    return over_lanes<int64_t>(value, [](int64_t sum, int, int64_t shown) { return sum + shown; });
  }
  int64_t warp_max(int64_t value) const {
    return over_lanes<int64_t>(value, [](int64_t most, int, int64_t shown) { return std::max(most, shown); });
  }
  int64_t warp_scan(int64_t value) const {
    return over_lanes<int64_t>(
        value, [&](int64_t sum, int other, int64_t shown) { return sum + (other < lane() ? shown : 0); });
  }

 private:
  template <class T, class Fold>
  T over_lanes(int64_t value, Fold fold) const {
    warp_meet->shown[lane()] = value;
    warp_sync();
    T folded = 0;
    for (int lane = 0; lane < width(); ++lane) folded = fold(folded, lane, warp_meet->shown[lane]);
    warp_sync();
    return folded;
  }
};

/// Runs phase after phase; between two, all threads meet and every block's shared memory is lost.
template <int kPhase, class Step>
void run_phases(const Step& step, const ThreadBlock& team, Ints& shared, std::barrier<>& all) {
  step.template phase<kPhase>(team, shared.data());
  all.arrive_and_wait();
  if constexpr (kPhase + 1 < Step::kPhases) {
    if (team.rank() == 0) std::fill(shared.begin(), shared.end(), kPoison);
    team.sync();
    run_phases<kPhase + 1>(step, team, shared, all);
  }
}

template <class Step>
void run(const Step& step, Shape shape) {
  const auto ints = static_cast<size_t>(step.shared_ints(shape.warps, shape.lanes()));
  if (shape.blocks * shape.lanes() == 1) {
    Ints shared(ints, kPoison);
    return flexep::run_solo(step, shared.data());
  }
  std::vector<Ints> shared(shape.blocks, Ints(ints, kPoison));
  std::deque<std::barrier<>> meets;
  std::deque<WarpMeeting> warps;
  std::barrier<> all(shape.blocks * shape.lanes());
  std::vector<std::jthread> threads;
  for (int block = 0; block < shape.blocks; ++block) {
    meets.emplace_back(shape.lanes());
    for (int lane = 0; lane < shape.lanes(); ++lane) {
      if (lane % shape.width == 0) warps.emplace_back(shape.width);
      const ThreadBlock team{shape, block, lane, &meets.back(), &warps.back()};
      threads.emplace_back([&, team, block] { run_phases<0>(step, team, shared[block], all); });
    }
  }
}

template <class Step>
Ints workspace(const Step& step, Shape shape) {
  return Ints(static_cast<size_t>(step.workspace_ints(shape.blocks)), kPoison);
}

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
    capacity = upto(1) ? -1 : experts * alignment + upto(20);
    for (int r = 0; r < ranks; ++r) {
      tokens.push_back(upto(24));
      Ints idx;
      for (int i = 0; i < tokens[r] * top_k; ++i) idx.push_back(upto(experts) - 1);
      topk_idx.push_back(idx);
    }
  }
  flexep::TableView table() const {
    return {experts, ranks, place_of_expert.data(), rank_of_place.data(), rank_begin.data()};
  }
};

/// Appends to one list; a word that a step should have written and did not stays poison.
struct Written {
  Ints all;
  template <class... Lists>
  void keep(const Lists&... lists) {
    (all.insert(all.end(), lists.begin(), lists.end()), ...);
  }
};

void plan_source(const World& w, int s, const Ints& base, const Ints& start, const Ints& cut, Shape shape,
                 Written& written) {
  const int R = w.ranks, K = w.top_k, T = w.tokens[s], S = R * T;
  std::vector<Ints> slots(5, Ints(T * K, kPoison));
  Ints send_token(S, kPoison), send_counts(R, kPoison);
  flexep::AssignRows assign{w.topk_idx[s].data(),
                            T,
                            K,
                            w.table(),
                            &base[s * w.experts],
                            start.data(),
                            cut.data(),
                            T,
                            S,
                            slots[0].data(),
                            slots[1].data(),
                            slots[2].data(),
                            slots[3].data(),
                            slots[4].data(),
                            send_token.data(),
                            send_counts.data(),
                            nullptr};
  Ints assign_workspace = workspace(assign, shape);
  assign.workspace = assign_workspace.data();
  run(assign, shape);
  for (const Ints& v : slots) written.keep(v);
  Ints weights(T * K, 5), meta(S * (1 + 2 * K), kPoison);
  run(flexep::PackMeta{slots[0].data(), slots[2].data(), send_token.data(), weights.data(), true, T, K, S,
                       meta.data()},
      shape);
  Ints source(T, kPoison), compact(T * K, kPoison), inverse(64, kPoison);
  flexep::CompactRows pack{slots[0].data(), slots[1].data(), s % R,  T, K, T,
                           source.data(),   compact.data(),  nullptr};
  Ints pack_workspace = workspace(pack, shape);
  pack.workspace = pack_workspace.data();
  run(pack, shape);
  run(flexep::InvertRows{compact.data(), T, K, 64, inverse.data()}, shape);
  written.keep(send_token, send_counts, meta, source, compact, inverse);
}

/// Everything that the plan of R ranks writes.
Ints plan_ranks(const World& w, Shape shape) {
  const int R = w.ranks, E = w.experts;
  Written written;
  Ints counts(R * E, kPoison), rank_tokens(R * R, kPoison);
  for (int s = 0; s < R; ++s) {
    flexep::CountSlots count{w.topk_idx[s].data(), w.tokens[s],         w.top_k, w.table(),
                             &counts[s * E],       &rank_tokens[s * R], nullptr};
    Ints scratch = workspace(count, shape);
    count.workspace = scratch.data();
    run(count, shape);
  }
  Ints base(R * E, kPoison), start(E, kPoison), kept(E, kPoison), dropped(E, kPoison), cut(R, kPoison);
  std::vector<int64_t> rows(R, kPoison);
  run(flexep::ResolveRows{counts.data(), w.table(), w.alignment, w.capacity, base.data(), start.data(),
                          kept.data(), dropped.data(), cut.data(), rows.data()},
      shape);
  written.keep(counts, rank_tokens, base, start, kept, dropped, cut, rows);
  for (int s = 0; s < R; ++s) plan_source(w, s, base, start, cut, shape, written);
  return written.all;
}

/// The plan of one rank, of ids in the wide type, some of them no expert's; and a transposed map.
Ints plan_one(const World& w, Shape shape) {
  const int E = w.experts, T = w.tokens[0], K = w.top_k;
  const int most = w.capacity < 0 ? T * K + E * w.alignment : w.capacity;
  std::vector<int64_t> wide(w.topk_idx[0].begin(), w.topk_idx[0].end());
  for (size_t i = 0; i < wide.size(); i += 7) wide[i] = i % 2 ? E + 5 : -3;
  Ints ids(T * K, kPoison), row_map(T * K, kPoison), row_src(most, kPoison), counts(E, kPoison);
  Ints padded(E, kPoison), dropped(E, kPoison), outside(1, kPoison);
  std::vector<int64_t> rows(1, kPoison);
  flexep::PlanPermutation permute{{wide.data(), true},
                                  T,
                                  K,
                                  E,
                                  w.alignment,
                                  w.capacity,
                                  ids.data(),
                                  row_map.data(),
                                  row_src.data(),
                                  counts.data(),
                                  padded.data(),
                                  dropped.data(),
                                  outside.data(),
                                  rows.data(),
                                  nullptr};
  Ints scratch = workspace(permute, shape);
  permute.workspace = scratch.data();
  run(permute, shape);
  if (w.capacity < 0) row_src.resize(static_cast<size_t>(rows[0]));
  Ints transposed(E * 6, kPoison);
  run(flexep::TransposeChunks{E * 6, E, 2, transposed.data()}, shape);
  Written written;
  written.keep(ids, row_map, row_src, counts, padded, dropped, outside, rows, transposed);
  return written.all;
}

}  // namespace

int main() {
  std::mt19937 random(7);
  const Shape shapes[] = {{1, 1, 3}, {9, 1, 2}, {2, 3, 2}, {2, 2, 4}};
  for (int number = 0; number < 12; ++number) {
    const World world(random);
    for (const auto plan : {plan_ranks, plan_one}) {
      const Ints one = plan(world, kOne);
      for (int32_t value : one)
        if (value == kPoison) return std::printf("world %d: one lane left a word unwritten\n", number), 1;
      for (const Shape& shape : shapes)
        if (plan(world, shape) != one)
          return std::printf("world %d: %d blocks of %d warps of %d lanes differ from one lane\n", number,
                             shape.blocks, shape.warps, shape.width),
                 1;
    }
  }
  std::puts("12 worlds, one lane and 4 shapes of blocks, warps and lanes: equal");
}
