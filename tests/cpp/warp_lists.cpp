// A warp that reads the plan's lists by its 32 lanes together must find what one lane finds in the generic text, which
// CPU ranks run: which rows lie in a chunk, and which pieces of which rows are added, in which order. Random worlds;
// prints the first difference and exits 1.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kernels/device_lists.cuh"
#include "warp/sums.h"

namespace {

using namespace warp;

/// Rows of some sources, and how chunks cut them.
struct Lists {
  Ints tokens_of, token, base{0};
  Cut cut;
  int first;

  explicit Lists(Random& random) {
    const int lists = random.one_in(4) ? 40 : 1 + random.below(5),
              most = random.one_of({30, 100, 3000 / lists});
    const int missing = random.one_of({0, 0, 1, 50, 90});  // of a hundred tokens
    for (int list = 0; list < lists; ++list) {
      tokens_of.push_back(random.one_in(6) ? 0 : random.below(most + 1));
      for (int t = 0; t < tokens_of[list]; ++t)
        if (random.below(100) >= missing) token.push_back(t);
      base.push_back(static_cast<int>(token.size()));
    }
    for (Ints* list : {&tokens_of, &token, &base}) list->shrink_to_fit();
    const int slices = 1 + random.below(4);
    cut = {1 + random.below(random.one_of({4, 40, 400})), slices, random.below(slices)};
    first = random.below(lists);
  }
  int lists() const { return static_cast<int>(tokens_of.size()); }
  Arrivals arrivals() const { return {token.data(), base.data(), nullptr, 1}; }
};

void check_same(const char* what, int where, Range found, Range expected) {
  if (found.begin != expected.begin || found.end != expected.end)
    fail("%s, %d: lane %d has [%d, %d), one lane [%d, %d)", what, where, the_warp.lane(), found.begin,
         found.end, expected.begin, expected.end);
}

struct Turn {
  int chunk, step;
};

/// The turns of a role, in its order: it leaves out lists that have no such chunk, and may leave out others.
std::vector<Turn> turns_of(const Lists& lists, Random& random) {
  std::vector<Turn> turns;
  const int left_out = random.one_of({2, 50});
  for (int chunk = 0, most = most_chunks(lists.tokens_of.data(), lists.lists(), lists.cut); chunk < most;
       ++chunk)
    for (int step = 0; step < lists.lists(); ++step)
      if (chunk < lists.cut.chunks(lists.tokens_of[(lists.first + step) % lists.lists()]) &&
          !random.one_in(left_out))
        turns.push_back({chunk, step});
  return turns;
}

void check_chunks(const Lists& lists, Random& random) {
  const std::vector<Turn> turns = turns_of(lists, random);
  const auto rows_of = [&](auto lanes) {
    return ChunkRows<decltype(lanes)>(lists.arrivals(), lists.tokens_of.data(), lists.cut, lists.lists(),
                                      lists.first);
  };
  const auto one = rows_of(Solo{});
  const bool prepares = random.one_in(2);
  the_warp.run([&] {
    const MoverWarp lanes{};
    auto rows = rows_of(lanes);
    if (prepares) rows.prepare(lanes);
    for (const auto& [chunk, step] : turns) {
      const int list = (lists.first + step) % lists.lists();
      const Range all{lists.base[list], lists.base[list + 1]}, expected = one(Solo{}, chunk, step);
      check_same("the rows of a turn", chunk * lists.lists() + step, rows(lanes, chunk, step), expected);
      check_same("a chunk's rows", chunk, in_chunk(lanes, lists.token.data(), all, lists.cut, chunk),
                 expected);
    }
  });
}

/// A part of a list, searched and read.
void check_list(const Lists& lists, Random& random) {
  const int list = random.below(lists.lists()), token = random.below(lists.tokens_of[list] + 2);
  const Range part = random.part({lists.base[list], lists.base[list + 1]});
  Ints places;  // mostly one after the other
  for (int i = part.begin; i < part.end; i += random.one_in(10) ? random.below(70) : 1) places.push_back(i);
  if (!places.empty()) places.push_back(part.begin);
  const int* const all = lists.token.data();
  const int top_k = 1 + random.below(4);
  const Range rows{part.begin / top_k, part.end / top_k};
  const int expected = first_from(Solo{}, all, part, token);
  the_warp.run([&] {
    const MoverWarp lanes{};
    const int found = first_from(lanes, all, part, token);
    check_same("the first place from a token on", token, {found, part.end}, {expected, part.end});
    auto read = ints(lanes, all, part);
    for (const int i : places)
      if (const int value = read[i]; value != all[i])
        fail("place %d: lane %d reads %d instead of %d", i, the_warp.lane(), value, all[i]);
    auto of_rows = of_tokens(lanes, all, rows, top_k);
    for (int i = 0; i < (rows.end - rows.begin) * top_k; ++i)
      if (of_rows[i] != all[rows.begin * top_k + i]) fail("place %d of rows is another", i);
  });
}

}  // namespace

/// `warp_lists [FIRST COUNT]`: the seeds of the worlds.
int main(int argc, char** argv) {
  const int first = argc > 1 ? std::atoi(argv[1]) : 0, count = argc > 2 ? std::atoi(argv[2]) : 300;
  for (seed = first; seed < first + count; ++seed) {
    Random random{std::mt19937(seed)};
    check_sums(random);
    const Lists lists(random);
    check_chunks(lists, random);
    check_list(lists, random);
  }
  std::printf("%d worlds, 32 lanes and one: equal\n", count);
}
