// Cutting work: chunks of source tokens, the same on every rank, and the lists of rows that fall into one.
#pragma once
#include <cstdint>

#include "base/hd.h"
#include "base/math.h"
#include "base/team.h"
#include "kernels/args.h"
#include "proto/window.h"

namespace flexep {

struct Range {
  int begin, end;
};

/// How one slice of a window cuts a sequence (tokens, or bytes of records) into its chunks: chunk c of slice s holds
/// elements [first(c), first(c) + size), and all slices together hold all.
struct Cut {
  int size, slices, slice;

  /// Chunks of this slice.
  FLEXEP_HD constexpr int chunks(std::int64_t elements) const {
    const int all = of_all_slices(elements);
    return all <= slice ? 0 : ceil_div(all - slice, slices);
  }
  FLEXEP_HD constexpr std::int64_t first(int chunk) const {
    return (static_cast<std::int64_t>(chunk) * slices + slice) * size;
  }
  /// The elements of a chunk, of a sequence of `elements`.
  FLEXEP_HD constexpr Range range(int chunk, int elements) const {
    const auto begin = static_cast<int>(first(chunk));
    return {begin, elements - begin < size ? elements : begin + size};
  }

 private:
  /// By a 32-bit division wherever that does: a GPU has no 64-bit one.
  FLEXEP_HD constexpr int of_all_slices(std::int64_t elements) const {
    if (elements <= INT32_MAX)
      return static_cast<int>(
          ceil_div(static_cast<std::uint32_t>(elements), static_cast<std::uint32_t>(size)));
    return static_cast<int>(ceil_div(elements, static_cast<std::int64_t>(size)));
  }
};

FLEXEP_HD constexpr Cut pull_cut(const WindowLayout& layout) {
  return {layout.shape.pull_tokens, layout.shape.slices, layout.slice};
}
FLEXEP_HD constexpr Cut push_cut(const WindowLayout& layout) {
  return {layout.shape.push_tokens, layout.shape.slices, layout.slice};
}

/// The first place in list[range), which ascends, whose token is not below `token`. Lanes that search together have
/// their own.
template <class Lanes>
FLEXEP_HD int first_from(const Lanes&, const std::int32_t* list, Range range, std::int64_t token) {
  while (range.begin < range.end) {
    const int middle = range.begin + (range.end - range.begin) / 2;
    if (list[middle] < token)
      range.begin = middle + 1;
    else
      range.end = middle;
  }
  return range.begin;
}

/// Where that place can be in the list of a source with so many tokens, list[range): its tokens differ, so it is no further
/// in than the token says, nor further out than if all that are missing were below it.
FLEXEP_HD Range can_begin(Range range, int tokens, std::int64_t token) {
  const int rows = range.end - range.begin, below = token < tokens ? static_cast<int>(token) : tokens;
  const int missing = tokens - rows;
  return {range.begin + (below > missing ? below - missing : 0), range.begin + (below < rows ? below : rows)};
}

/// list[range), to be read as ints(...)[i]. Lanes that read together have their own.
template <class Lanes>
FLEXEP_HD const std::int32_t* ints(const Lanes&, const std::int32_t* list, Range) {
  return list;
}

/// `top_k` integers for each of a few rows, to be read from the first one's on.
template <class Lanes>
FLEXEP_HD auto of_tokens(const Lanes& lanes, const std::int32_t* list, Range rows, int top_k) {
  return ints(lanes, list + static_cast<long long>(rows.begin) * top_k, {0, (rows.end - rows.begin) * top_k});
}

/// The part of an ascending list of tokens, list[range), that lies in a chunk.
template <class Lanes>
FLEXEP_HD Range in_chunk(const Lanes& lanes, const std::int32_t* list, Range range, const Cut& cut,
                         int chunk) {
  range.begin = first_from(lanes, list, range, cut.first(chunk));
  return {range.begin, first_from(lanes, list, range, cut.first(chunk) + cut.size)};
}

/// The rows of each chunk in the lists of all sources, which a role goes through in turns: in its step-th turn of a chunk
/// it is the list (first + step) % lists. Lanes that search together look for many turns at once (device_lists.cuh), so
/// that a turn begins without trips to memory.
template <class Lanes>
class ChunkRows {
 public:
  /// tokens_of: [lists], of the sources.
  FLEXEP_HD ChunkRows(const Arrivals& arrivals, const std::int32_t* /*tokens_of*/, const Cut& cut, int lists,
                      int first)
      : arrivals_(arrivals), cut_(cut), lists_(lists), first_(first) {}

  /// May be called before the first turn.
  FLEXEP_HD void prepare(const Lanes&) const {}
  FLEXEP_HD Range operator()(const Lanes& lanes, int chunk, int step) const {
    const int list = (first_ + step) % lists_;
    return in_chunk(lanes, arrivals_.token, {arrivals_.base[list], arrivals_.base[list + 1]}, cut_, chunk);
  }

 private:
  const Arrivals arrivals_;
  const Cut cut_;
  const int lists_, first_;
};

/// The largest number of chunks of any rank.
FLEXEP_HD int most_chunks(const std::int32_t* tokens_of, int ranks, const Cut& cut) {
  int most = 0;
  for (int r = 0; r < ranks; ++r) most = tokens_of[r] > most ? tokens_of[r] : most;
  return cut.chunks(most);
}

/// The lanes in other turns: where shares differ in size, nobody has the large one every time.
template <class Lanes>
FLEXEP_HD Lane turned(const Lanes& lanes, int turn) {
  return {(lanes.rank() + turn) % lanes.size(), lanes.size()};
}

/// A lane's share of a range; a slice's is share(Lane{slice, slices}, range).
template <class Lanes>
FLEXEP_HD Range share(const Lanes& lanes, Range range) {
  const LaneRange mine(lanes, range.end - range.begin);
  return {range.begin + mine.begin, range.begin + mine.end};
}

}  // namespace flexep
