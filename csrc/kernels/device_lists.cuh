// How a warp that is one lane of a role reads the plan's lists: 32 places at a time.
#pragma once
#include <climits>
#include <cstdint>
#include <type_traits>

#include "base/dtype.h"
#include "kernels/chunks.h"
#include "mem/cuda_movers.cuh"

namespace flexep {

constexpr unsigned kAllLanes = 0xffffffffu;
__device__ __forceinline__ int warp_lane() { return static_cast<int>(threadIdx.x) % 32; }

/// Calls f with the dtype as a constant.
template <class F>
__device__ __forceinline__ void with_dtype(DType dtype, const F& f) {
  if (dtype == DType::bf16) return f(std::integral_constant<DType, DType::bf16>{});
  if (dtype == DType::f16) return f(std::integral_constant<DType, DType::f16>{});
  return f(std::integral_constant<DType, DType::f32>{});
}

/// Integers that a warp reads 32 at a time, each by another lane.
class WarpInts {
 public:
  __device__ WarpInts(const std::int32_t* list, Range range)
      : list_(list), end_(range.end), first_(range.begin) {
    load();
  }
  __device__ int operator[](int i) {
    if (i < first_ || i >= first_ + 32) first_ = i, load();
    return __shfl_sync(kAllLanes, value_, i - first_);
  }

 private:
  __device__ void load() { value_ = first_ + warp_lane() < end_ ? list_[first_ + warp_lane()] : 0; }

  const std::int32_t* list_;
  int end_, first_, value_;
};
__device__ inline WarpInts ints(const MoverWarp&, const std::int32_t* list, Range range) {
  return {list, range};
}

/// A search by all threads of a warp, 32 places at a time; see chunks.h.
__device__ inline int first_from(const MoverWarp&, const std::int32_t* list, Range range,
                                 std::int64_t token) {
  while (range.begin < range.end) {
    const int stride = ceil_div(range.end - range.begin, 32), at = range.begin + warp_lane() * stride;
    const int below = __popc(__ballot_sync(kAllLanes, at < range.end && list[at] < token));
    if (below == 0) return range.begin;
    const int last =
        range.begin + (below - 1) * stride;  // below the token, and the next one looked at is not
    range = {last + 1, min(last + stride, range.end)};
  }
  return range.begin;
}
/// Both ends are looked for where they are if hardly a token is missing, which is one trip to memory for the two. The
/// tokens of a list differ, so none lies further in than it says.
__device__ inline Range in_chunk(const MoverWarp& lanes, const std::int32_t* list, Range range,
                                 const Cut& cut, int chunk) {
  const std::int64_t tokens[2] = {cut.first(chunk), cut.first(chunk) + cut.size};
  int near[2], value[2], found[2];
#pragma unroll
  for (int end = 0; end < 2; ++end) {
    const auto most = static_cast<int>(min(static_cast<std::int64_t>(range.end - range.begin), tokens[end]));
    near[end] = max(range.begin, range.begin + most - 32);
    const int at = near[end] + warp_lane();
    value[end] = at < range.begin + most ? list[at] : INT_MAX;
  }
#pragma unroll
  for (int end = 0; end < 2; ++end) {
    const int below = __popc(__ballot_sync(kAllLanes, value[end] < tokens[end]));
    found[end] = below > 0 || near[end] == range.begin
                     ? near[end] + below
                     : first_from(lanes, list, {range.begin, near[end]}, tokens[end]);
  }
  return {found[0], found[1]};
}

/// A turn on each lane: one search for the ranges of 32 turns instead of one for each of them.
template <>
class ChunkRows<MoverWarp> {
 public:
  __device__ ChunkRows(const Arrivals& arrivals, const std::int32_t* tokens_of, const Cut& cut, int lists,
                       int first)
      : arrivals_(arrivals), tokens_of_(tokens_of), cut_(cut), lists_(lists), first_(first) {}

  __device__ void prepare(const MoverWarp&) { look(0); }
  /// Turns may be left out, and none comes back.
  __device__ Range operator()(const MoverWarp&, int chunk, int step) {
    const int turn = chunk * lists_ + step;
    if (turn >= from_ + 32) look(turn);
    return {__shfl_sync(kAllLanes, begin_.at.begin, turn - from_),
            __shfl_sync(kAllLanes, end_.at.begin, turn - from_)};
  }

 private:
  /// The first place whose token is not below one: `at.begin` in the end.
  struct Sought {
    Range at;
    std::int64_t token;

    __device__ bool open() const { return at.begin < at.end; }
    __device__ int middle() const { return at.begin + (at.end - at.begin) / 2; }
    __device__ void narrow(int value) { (value < token ? at.begin : at.end) = middle() + (value < token); }
  };

  __device__ void look(int from) {
    from_ = from;
    const int turn = from + warp_lane(), list = (first_ + turn % lists_) % lists_;
    const Range rows{arrivals_.base[list], arrivals_.base[list + 1]};
    const std::int64_t first = cut_.first(turn / lists_), end = first + cut_.size;
    begin_ = {can_begin(rows, tokens_of_[list], first), first};
    end_ = {can_begin(rows, tokens_of_[list], end), end};
    while (begin_.open() || end_.open()) {  // both with one trip to memory
      const int at_begin = begin_.open() ? arrivals_.token[begin_.middle()] : 0;
      const int at_end = end_.open() ? arrivals_.token[end_.middle()] : 0;
      if (begin_.open()) begin_.narrow(at_begin);
      if (end_.open()) end_.narrow(at_end);
    }
  }

  const Arrivals arrivals_;
  const std::int32_t* const tokens_of_;
  const Cut cut_;
  const int lists_, first_;
  int from_ = -32;  // begin_ and end_ are those of turn from_ + lane
  Sought begin_{}, end_{};
};

}  // namespace flexep
