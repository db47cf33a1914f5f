// Cutting work: chunks of source tokens, the same on every rank, and the lists of rows that fall into one.
#pragma once
#include <cstdint>

#include "base/hd.h"
#include "base/math.h"

namespace flexep {

struct Range {
  int begin, end;
};

/// The part of an ascending list of tokens, list[range), that lies in chunk `chunk` of `size` tokens.
FLEXEP_HD Range in_chunk(const std::int32_t* list, Range range, int chunk, int size) {
  const auto lower = [&](long long token) {
    int low = range.begin, high = range.end;
    while (low < high) {
      const int middle = low + (high - low) / 2;
      if (list[middle] < token)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  };
  const long long first = static_cast<long long>(chunk) * size;
  return {lower(first), lower(first + size)};
}

/// The largest number of chunks of any rank.
FLEXEP_HD int most_chunks(const std::int32_t* tokens_of, int ranks, int size) {
  int most = 0;
  for (int r = 0; r < ranks; ++r) most = tokens_of[r] > most ? tokens_of[r] : most;
  return ceil_div(most, size);
}

/// A lane's share of a range.
template <class Team>
FLEXEP_HD Range share(const Team& team, Range range) {
  const long long n = range.end - range.begin;
  return {static_cast<int>(range.begin + n * team.rank() / team.size()),
          static_cast<int>(range.begin + n * (team.rank() + 1) / team.size())};
}

}  // namespace flexep
