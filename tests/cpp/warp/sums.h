// Which sums a combine adds, of which terms: a feeder's pieces (kernels/device_fed.cuh) and the terms of SumRows
// (kernels/device_sums.cuh), against the generic text of kernels/collect.h by one lane.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "kernels/device_fed.cuh"
#include "warp/random.h"

namespace warp {

using namespace flexep;

/// A rank's side of a combine. Rows are addresses that nobody looks at.
struct World {
  Topology topology{};
  int me, T;
  Ints tokens_of, token, base{0}, rows, home_rank;
  std::vector<float> part_weights;
  CollectArgs args{};

  explicit World(Random& random) {
    const int ranks = random.one_in(2) ? 1 + random.below(2) : 1 + random.below(6);
    topology = {ranks, random.one_in(3) && ranks % 2 == 0 ? ranks / 2 : ranks};
    me = random.below(ranks);
    const int top_k =
        random.one_in(8) ? 9 + random.below(kMaxTopK - 8) : random.one_of({1, 1, 2, 3, 4, 5, 8});
    const int most_tokens = random.one_of({5, 40, 90}), empty = random.one_of({0, 20, 60, 95, 100});
    const int hot = random.below(2 * ranks);  // a rank that gets every other slot, if there is one
    for (int source = 0; source < ranks; ++source) {
      tokens_of.push_back(random.one_in(8) ? 0 : random.below(most_tokens + 1));
      for (int t = 0; t < tokens_of[source]; ++t) {
        Ints ranks_of(top_k);  // of the token's slots
        for (auto& rank : ranks_of) {
          const bool to_hot = hot < ranks && random.one_in(2);
          rank = random.below(100) < empty ? -1 : to_hot ? hot : random.below(ranks);
        }
        take(source, t, ranks_of, random);
      }
      base.push_back(static_cast<int>(token.size()));
    }
    number_rows(random);
    T = tokens_of[me];
    for (Ints* list : {&tokens_of, &token, &base, &rows, &home_rank}) list->shrink_to_fit();
    part_weights.shrink_to_fit();

    const DType dtypes[] = {DType::f32, DType::f16, DType::bf16};
    args.tokens_of = tokens_of.data();
    args.y = fake_address(kMaxTopK, 0);
    args.z = fake_address(kMaxTopK + 1, 0);
    args.flat = random.one_in(4);
    args.part_weights = args.flat || random.one_in(2) ? nullptr : part_weights.data();
    args.arrivals = {token.data(), base.data(), rows.data(), top_k};
    args.home_rank = home_rank.data();
    args.dtype = dtypes[random.below(3)];
    args.wire = random.one_in(4) ? dtypes[random.below(3)] : args.dtype;
    args.out_dtype = dtypes[random.below(3)];
    args.hidden = 8 * (1 + random.below(20));
  }
  World(const World&) = delete;

  const char* y(std::int64_t row) const {
    return static_cast<const char*>(args.y) + row * args.hidden * size_of(args.dtype);
  }
  char* z(int t) const { return static_cast<char*>(args.z) + t * args.hidden * size_of(args.out_dtype); }
  std::size_t row_bytes() const { return args.hidden * size_of(args.wire); }

 private:
  /// A token's place in my lists.
  void take(int source, int t, Ints ranks_of, Random& random) {
    if (std::count(ranks_of.begin(), ranks_of.end(), me) > 0) {
      token.push_back(t);
      const bool keeps = source == me || !random.one_in(20);  // else a row without slots, whose sum is zero
      for (const int rank : ranks_of) {
        rows.push_back(rank == me && keeps ? 0 : -1);
        part_weights.push_back(static_cast<float>(1 + random.below(1000)));
      }
    }
    if (source != me) return;
    std::sort(ranks_of.begin(), ranks_of.end());
    const auto first = std::upper_bound(ranks_of.begin(), ranks_of.end(), -1);
    const auto last = std::unique(first, ranks_of.end());
    home_rank.insert(home_rank.end(), first, last);
    home_rank.insert(home_rank.end(), ranks_of.size() - (last - first), -1);
  }
  /// A row of y for every slot that is mine, in no order and with gaps.
  void number_rows(Random& random) {
    Ints numbers(2 * rows.size());
    for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<int>(i);
    std::shuffle(numbers.begin(), numbers.end(), random.bits);
    for (auto& row : rows)
      if (row >= 0) row = numbers.back(), numbers.pop_back();
  }
};

/// What a lane is to add: partial sums of the rows of `home`, or what has come home to me.
struct Work {
  int home;  // -1: at home
  Range mine;
  OwnSums own;
};

struct Term {
  const char* from;
  float weight;
  bool rounds;  // what is added so far is rounded, behind this term
};
struct Sum {
  char* to;
  std::vector<Term> terms;
};

/// The Row and Mem of one lane: keeps sums instead of adding.
class OneLane {
 public:
  explicit OneLane(const World& world) : world_(world) {}

  std::vector<Sum> sums;
  Counted counted;

  const void* view(int from, std::size_t at, std::size_t) const { return fake_address(from, at); }
  void* target(int to, std::size_t at, std::size_t bytes) {
    counted.rows += 1, counted.bytes += static_cast<std::int64_t>(bytes);
    return fake_address(to, at);
  }
  void partial(int j, int, void* to) { sums.push_back({static_cast<char*>(to), terms_of(j)}); }
  const void* own_sum(int j) {
    own_ = terms_of(j);
    own_.back().rounds = true;
    return &own_;
  }
  void home(int token, const void* const* rows, const int* rings, int count) {
    Sum sum{world_.z(token), {}};
    for (int i = 0; i < count; ++i) {
      const int nest = world_.args.nest;
      const bool ends = nest > 0 && (i + 1 == count || rings[i] / nest != rings[i + 1] / nest);
      if (rows[i] == &own_)  // before all others: see OwnSums
        sum.terms.insert(sum.terms.begin(), own_.begin(), own_.end());
      else
        sum.terms.push_back({static_cast<const char*>(rows[i]), 1.0f, ends});
    }
    sums.push_back(sum);
  }

 private:
  /// A received row's slots here, by ascending row.
  std::vector<Term> terms_of(int j) const {
    const CollectArgs& args = world_.args;
    if (args.flat) return {{world_.y(j), 1.0f, false}};
    std::vector<Term> terms;
    const int top_k = args.arrivals.top_k;
    for (int slot = j * top_k; slot < (j + 1) * top_k; ++slot)
      if (args.arrivals.rows[slot] >= 0)
        terms.push_back(
            {world_.y(args.arrivals.rows[slot]), args.part_weights ? args.part_weights[slot] : 1.0f, false});
    std::sort(terms.begin(), terms.end(), [](const Term& a, const Term& b) { return a.from < b.from; });
    return terms;
  }

  const World& world_;
  std::vector<Term> own_;
};

constexpr std::size_t kStride = 1024, kRing = 1 << 20;  // of a window: rows, and rings of them

/// The text of the roles: one lane's, or that of a warp.
template <class Lanes, class Row, class Mem>
void add_home(const Lanes& lanes, Row& row, Mem& mem, const World& world, const Work& work) {
  const Topology& topology = world.topology;
  const auto ring_of = [&](int rank) { return topology.domains() == 1 ? rank : topology.domain(rank); };
  const auto at = [](int token, int ring) { return ring * kRing + token * kStride; };
  add_tokens(lanes, row, mem, world.me, work.mine, world.args, work.own, ring_of, at, world.row_bytes());
}
template <class Lanes, class Row, class Mem>
void add(const Lanes& lanes, Row& row, Mem& mem, const World& world, const Work& work) {
  if (work.home < 0) return add_home(lanes, row, mem, world, work);
  const auto at = [&](int token) { return world.me * kRing + token * kStride; };
  add_received(lanes, row, mem, work.mine, world.token.data(), work.home, at, world.row_bytes());
}

using Pieces = FedPieces<TermPiece>;

inline bool alike(const Pieces::Piece& a, const Pieces::Piece& b) {
  const TermPiece &x = a.note, &y = b.note;
  return a.from == b.from && a.bytes == b.bytes && x.to == y.to && x.count == y.count &&
         x.weight == y.weight && x.first == y.first && x.last == y.last && x.rounds == y.rounds;
}

inline void print(const char* who, const Pieces& pieces, std::size_t i) {
  if (i >= pieces.fed.size()) return (void)std::printf("%s: no piece %zu\n", who, i);
  const auto& [from, bytes, note] = pieces.fed[i];
  std::printf("%s: piece %zu is %d bytes at %p, times %g, to %d vectors at %p%s%s%s\n", who, i, bytes,
              static_cast<const void*>(from), note.weight, note.count, static_cast<void*>(note.to),
              note.first ? ", first" : "", note.last ? ", last" : "", note.rounds ? ", rounds" : "");
}

[[noreturn]] inline void differ(const World& world, const Work& work) {
  fail("rank %d of %d in domains of %d, top_k %d, home %d, own %d, flat %d: [%d, %d) differs", world.me,
       world.topology.ranks, world.topology.domain_size, world.args.arrivals.top_k, work.home,
       static_cast<int>(work.own), world.args.flat, work.mine.begin, work.mine.end);
}

/// Fed pieces are those of the sums of one lane, sum by sum: a piece of every term, then the next piece.
inline void check_fed(const World& world, const Work& work, Random& random) {
  const CollectArgs& args = world.args;
  const DType in = work.home >= 0 ? args.dtype : args.wire, out = work.home >= 0 ? args.wire : args.out_dtype;
  OneLane one(world);
  add(Solo{}, one, one, world, work);

  Pieces found{1 + random.below(8), kVectorBytes * (1 + random.below(24)), {}}, expected = found;
  cleared_vectors.clear();
  with_dtype(in, [&](auto dtype) {
    the_warp.run([&] {
      FeedMover<TermPiece> mover(found);
      FedRows<decltype(dtype)::value> rows(args, mover, out);
      OneLane none(world);
      add(MoverWarp{{0, 1}}, rows, none, world, work);
    });
  });

  const int bytes = static_cast<int>(args.hidden * size_of(in)), out_bytes = args.hidden * size_of(out);
  std::vector<char*> cleared;
  for (const auto& [to, terms] : one.sums) {
    if (terms.empty())
      for (int at = 0; at < out_bytes; at += kVectorBytes) cleared.push_back(to + at);
    for (int at = 0; at < bytes; at += found.stage_bytes)
      for (std::size_t i = 0; i < terms.size(); ++i) {
        const int size = std::min(found.stage_bytes, bytes - at);
        expected.fed.push_back({terms[i].from + at, size,
                                TermPiece{to + at / size_of(in) * size_of(out), size / kVectorBytes,
                                          terms[i].weight, i == 0, i + 1 == terms.size(), terms[i].rounds}});
      }
  }
  for (std::size_t i = 0; i < std::max(found.fed.size(), expected.fed.size()); ++i) {
    if (i < found.fed.size() && i < expected.fed.size() && alike(found.fed[i], expected.fed[i])) continue;
    print("one lane", expected, i), print("warp", found, i);
    differ(world, work);
  }
  std::sort(cleared.begin(), cleared.end());
  std::sort(cleared_vectors.begin(), cleared_vectors.end());
  if (cleared_vectors != cleared) {
    std::puts("other rows are cleared");
    differ(world, work);
  }
  for (const Counted& counted : found.counted)
    if (counted != one.counted) {
      std::puts("other rows are counted");
      differ(world, work);
    }
}

/// What SumRows adds: keeps sums instead.
struct KeptSums {
  std::vector<Sum>* sums;

  void add(const Terms& terms, void* to) const {
    const auto rows = the_warp.meet(terms.row, Place::current());
    for (const std::uint64_t ends : the_warp.meet(terms.ends, Place::current()))
      if (ends != terms.ends) fail("lanes differ in where groups end");
    for (const std::uint64_t count : the_warp.meet(terms.count, Place::current()))
      if (count != static_cast<std::uint64_t>(terms.count)) fail("lanes differ in the number of terms");
    if (the_warp.lane() != 0) return;
    Sum sum{static_cast<char*>(to), {}};
    for (int i = 0; i < terms.count; ++i)
      sum.terms.push_back({reinterpret_cast<const char*>(rows[i]), 1.0f, (terms.ends >> i & 1) != 0});
    sums->push_back(sum);
  }
};

/// Sums that no feeder brings: those that are rounded in between.
inline void check_groups(World& world, Work work, Random& random) {
  work.own = OwnSums::pushed;
  world.args.nest = random.below(world.topology.ranks + 1);
  OneLane one(world);
  add_home(Solo{}, one, one, world, work);
  std::vector<Sum> sums;
  the_warp.run([&] {
    SumRows<DType::f32, KeptSums> rows(world.args, {&sums});
    OneLane mem(world);
    add_home(MoverWarp{{0, 1}}, rows, mem, world, work);
  });
  const auto same_term = [](const Term& a, const Term& b) {
    return a.from == b.from && a.rounds == b.rounds;
  };
  const auto same = [&](const Sum& a, const Sum& b) {
    return a.to == b.to && std::ranges::equal(a.terms, b.terms, same_term);
  };
  if (!std::ranges::equal(sums, one.sums, same)) differ(world, work);
  world.args.nest = 0;
}

inline void check_sums(Random& random) {
  World world(random);
  for (int home = 0; home < world.topology.ranks; ++home)
    check_fed(world, {home, random.part({world.base[home], world.base[home + 1]}), {}}, random);
  for (int lane = 0; lane < 2; ++lane) {
    OwnSums own = own_sums(world.topology, world.args);
    if (own == OwnSums::pushed && world.topology.domains() == 1 && world.args.dtype == world.args.wire &&
        lane == 1)
      own = OwnSums::added_at_home;  // its text holds for more than two ranks
    const Work work{-1, random.part({0, world.T}), own};
    check_fed(world, work, random);
    check_groups(world, work, random);
  }
}

}  // namespace warp
