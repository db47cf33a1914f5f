// The plan's text over blocks of warps of threads must write what it writes by one lane, for any shape: this is how a
// grid of CTAs runs it. Random worlds; prints the first difference and exits 1. Under TSan it also shows missing syncs.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <utility>
#include <vector>

#include "lanes.h"
#include "plan/assign.h"
#include "plan/counts.h"
#include "plan/peers.h"
#include "plan/permutation.h"
#include "plan/receive.h"
#include "plan/relay.h"
#include "plan/resolve.h"
#include "plan/transpose.h"

namespace {

using namespace lanes;

struct World {
  int ranks, experts, top_k, alignment, capacity;
  std::vector<int> tokens;
  std::vector<Ints> topk_idx;
  Ints place_of_expert, rank_of_place, rank_begin;

  explicit World(std::mt19937& random) {
    auto upto = [&](int n) { return static_cast<int>(random() % (n + 1)); };
    ranks = 1 + upto(4), experts = 1 + upto(9), top_k = 1 + upto(3), alignment = 1 + upto(3);
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

/// What a rank has counted, and has to keep until rows are assigned.
struct Counted {
  Ints said, number, workspace;
};

Counted count_source(const World& w, int s, int domains, Shape shape) {
  const int keys = flexep::CountSlots::keys(w.experts, w.ranks, domains);
  Counted out{Ints(4 + keys, kPoison), Ints(w.tokens[s] * w.top_k, kPoison), {}};
  std::vector<float> weights(out.number.size(), 1.0f);
  for (size_t i = 0; i < weights.size(); i += 5) weights[i] = NAN;
  flexep::CountSlots count{{w.topk_idx[s].data(), false},
                           w.tokens[s],
                           w.top_k,
                           w.table(),
                           domains,
                           s % 2 ? weights.data() : nullptr,
                           {1, 2, 3, 4},
                           out.said.data(),
                           out.number.data(),
                           nullptr,
                           nullptr};
  out.workspace = workspace(count, shape);
  count.workspace = out.workspace.data();
  run(count, shape);
  return out;
}

/// The outputs of a SendOrder.
struct Order {
  Ints order, slot_send, send_row, send_first, send_token, counts;
  Order(int rows, int top_k, int num_send, int owners)
      : order(rows * top_k, kPoison),
        slot_send(order),
        send_row(order),
        send_first(order),
        send_token(num_send, kPoison),
        counts(owners, kPoison) {}
  flexep::SendOrder step(int rows, int top_k, int owners, int unit, int split) {
    return {rows,
            top_k,
            owners,
            unit,
            split,
            static_cast<int>(send_token.size()),
            order.data(),
            slot_send.data(),
            send_row.data(),
            send_first.data(),
            send_token.data(),
            counts.data()};
  }
  void keep(Written& written) const { written.keep(slot_send, send_row, send_first, send_token, counts); }
};

/// What a relay would pass on of the records that this source sends, and what the last rank would read of those.
void pass_on(const Ints& rail, int top_k, int used, Shape shape, Written& written) {
  const int members = 2, Q = static_cast<int>(rail.size()) / (1 + 3 * top_k), Y = Q * members + 1;
  Order order(Q, top_k, Y, members);
  Ints token(Q, kPoison), meta(Y * (1 + 2 * top_k), kPoison);
  flexep::RelayRecords relay{rail.data(),
                             {top_k, true, true},
                             &used,
                             token.data(),
                             order.step(Q, top_k, members, 1, -1),
                             {{top_k, false, true}, meta.data()},
                             nullptr};
  Ints scratch = workspace(relay, shape);
  relay.workspace = scratch.data();
  run(relay, shape);
  order.keep(written);
  written.keep(token, meta);
  // As if the first rank had sent one of them, and the second the rest, which came first.
  const Ints base{0, 1, Y - 1}, arrival{Y - 2, 0};
  Ints came(Y, kPoison), rows(Y * top_k, kPoison), weights(rows), places(Y, kPoison);
  run(flexep::ReceiveRows{meta.data(),
                          {top_k, false, true},
                          Y,
                          0,
                          2,
                          base.data(),
                          arrival.data(),
                          0,
                          nullptr,
                          came.data(),
                          rows.data(),
                          weights.data(),
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr,
                          places.data()},
      shape);
  written.keep(came, rows, weights, places);
}

/// ResolveAndAssign writes what the two steps have written.
void assign_resolving(const World& w, int s, const flexep::AssignRows& assigned, flexep::ResolveRows resolve,
                      Shape shape, const Ints& meta) {
  const Ints row(assigned.slot_row, assigned.slot_row + assigned.items());
  Ints again(meta.size(), kPoison), rows(row.size(), kPoison);
  // What the layout's lists were, and where they are written again.
  std::vector<std::pair<Ints, Ints>> lists;
  lists.reserve(4);
  const auto anew = [&](const int32_t* list, int size) {
    lists.emplace_back(Ints(list, list + size), Ints(size, kPoison));
    return lists.back().second.data();
  };
  resolve.source = s, resolve.base = resolve.cut = nullptr;
  resolve.start = anew(resolve.start, w.experts), resolve.kept = anew(resolve.kept, w.experts);
  resolve.padded = anew(resolve.padded, w.experts), resolve.dropped = anew(resolve.dropped, w.experts);
  flexep::ResolveAndAssign both{assigned, resolve};
  both.base = both.start = both.cut = nullptr;
  both.records.meta = again.data(), both.slot_row = rows.data();
  run(both, shape);
  bool same = again == meta && rows == row;
  for (const auto& [before, after] : lists) same &= before == after;
  if (!same) {
    std::printf("rank %d: resolved and assigned in one step differs from two\n", s);
    std::exit(1);
  }
}

void plan_source(const World& w, int s, const Counted& counted, const flexep::ResolveRows& resolved,
                 int domains, Shape shape, Written& written) {
  const int32_t* const start = resolved.start;
  const int R = w.ranks, K = w.top_k, T = w.tokens[s], owners = domains > 0 ? domains : R;
  const int split = domains > 0 ? -1 : T, S = owners * T, width = 1 + K * (domains > 0 ? 3 : 2);
  Ints slot_row(T * K, kPoison), slot_rank(slot_row), rank_counts(R, domains > 0 ? kPoison : 0);
  Ints weights(T * K, 5), meta(S * width, kPoison);
  Order order(T, K, S, owners);
  flexep::AssignRows assign{{w.topk_idx[s].data(), false},
                            w.table(),
                            counted.number.data(),
                            counted.workspace.data(),
                            flexep::CountSlots::keys(w.experts, R, domains),
                            resolved.base + s * w.experts,
                            start,
                            resolved.cut,
                            domains,
                            weights.data(),
                            slot_row.data(),
                            slot_rank.data(),
                            order.step(T, K, owners, R / owners, split),
                            rank_counts.data(),
                            {{K, domains > 0, true}, meta.data()},
                            nullptr};
  Ints assign_workspace = workspace(assign, shape);
  assign.workspace = assign_workspace.data();
  run(assign, shape);
  order.keep(written);
  written.keep(slot_row, slot_rank, rank_counts, meta);
  assign_resolving(w, s, assign, resolved, shape, meta);
  if (domains > 0) {
    int used = 0;
    for (int n : order.counts) used += n;
    return pass_on(meta, K, used, shape, written);
  }
  // The records of the last rank alone: rows of several would meet.
  Ints token(T, kPoison), rows(T * K, kPoison), expert(rows), row_src(64, kPoison), row_weights(row_src),
      row_map(row_src);
  run(flexep::ClearRows{64, row_src.data(), row_weights.data(), row_map.data()}, shape);
  run(flexep::ReceiveRows{meta.data() + (R - 1) * T * width,
                          {K, false, true},
                          T,
                          64,
                          0,
                          nullptr,
                          nullptr,
                          w.rank_begin[R] - w.rank_begin[R - 1],
                          start + w.rank_begin[R - 1],
                          token.data(),
                          rows.data(),
                          nullptr,
                          expert.data(),
                          row_src.data(),
                          row_weights.data(),
                          row_map.data(),
                          nullptr},
      shape);
  written.keep(token, rows, expert, row_src, row_weights, row_map);
  Ints source(T, kPoison), compact(T * K, kPoison), inverse(64, kPoison);
  flexep::CompactRows pack{slot_row.data(), slot_rank.data(), s % R,  T, K, T,
                           source.data(),   compact.data(),   nullptr};
  Ints pack_workspace = workspace(pack, shape);
  pack.workspace = pack_workspace.data();
  run(pack, shape);
  run(flexep::InvertRows{compact.data(), T, K, 64, inverse.data()}, shape);
  written.keep(source, compact, inverse);
}

/// What each rank sends and gets of what everybody said.
void count_peers(const World& w, const Ints& said, int domains, Shape shape, Written& written) {
  const int R = w.ranks, stride = static_cast<int>(said.size()) / R;
  const flexep::SentCounts sent{&said[5 + w.experts], stride, R, domains};
  for (int rank = 0; rank < R; ++rank) {
    Ints one(3 * R, kPoison), base(R + 1, kPoison), hops(5 * R, domains > 0 ? kPoison : 0);
    Ints relay(domains + 1, domains > 0 ? kPoison : 0);
    run(flexep::PeerCounts{sent, &said[2], stride, rank, &one[0], &one[R], &one[2 * R], base.data(), &hops[0],
                           &hops[R], &hops[2 * R], &hops[3 * R], &hops[4 * R], relay.data()},
        shape);
    written.keep(one, base, hops, relay);
  }
}

/// Everything that the plan of R ranks writes, for ranks and over domains of two.
Ints plan_ranks(const World& w, Shape shape) {
  const int R = w.ranks, E = w.experts;
  Written written;
  for (const int domains : {0, R % 2 ? 0 : R / 2}) {
    std::vector<Counted> counted;
    Ints all;
    for (int s = 0; s < R; ++s) {
      counted.push_back(count_source(w, s, domains, shape));
      all.insert(all.end(), counted[s].said.begin(), counted[s].said.end());
    }
    Ints base(R * E, kPoison), start(E, kPoison), kept(start), padded(start), dropped(start), cut(R, kPoison);
    std::vector<int64_t> rows(R, kPoison);
    const flexep::ResolveRows resolve{&all[5],        static_cast<int64_t>(all.size()) / R,
                                      w.table(),      w.alignment,
                                      w.capacity,     -1,
                                      base.data(),    start.data(),
                                      kept.data(),    padded.data(),
                                      dropped.data(), cut.data(),
                                      rows.data()};
    run(resolve, shape);
    written.keep(all, base, start, kept, padded, dropped, cut, rows);
    count_peers(w, all, domains, shape, written);
    for (int s = 0; s < R; ++s) plan_source(w, s, counted[s], resolve, domains, shape, written);
  }
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
  const Shape shapes[] = {{1, 1, 4}, {5, 1, 4}, {1, 3, 4}, {2, 2, 4}};  // a token has at most as many slots
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
