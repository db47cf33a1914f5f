// What random worlds are made of.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <random>
#include <vector>

#include "kernels/chunks.h"

namespace warp {

using Ints = std::vector<std::int32_t>;

struct Random {
  std::mt19937 bits;

  int below(int n) { return static_cast<int>(bits() % n); }
  bool one_in(int n) { return below(n) == 0; }
  int one_of(std::initializer_list<int> values) {
    return values.begin()[below(static_cast<int>(values.size()))];
  }
  /// A part of a range: all of it, or any.
  flexep::Range part(flexep::Range all) {
    if (one_in(3)) return all;
    const int begin = all.begin + below(all.end - all.begin + 1);
    return {begin, begin + below(all.end - begin + 1)};
  }
};

}  // namespace warp
