// What the device's roles do with a row where a lane is a warp: the row functors, a row at a time. The same bits as
// host_rows.h.
#pragma once
#include <cstdint>
#include <type_traits>

#include "kernels/args.h"
#include "kernels/chunks.h"
#include "kernels/collect.h"
#include "mem/cuda_movers.cuh"
#include "ops/rows_vector.cuh"

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

/// Whose rows a warp weights, dots or copies, and where they go.
class DevicePlace {
 public:
  __device__ DevicePlace(const DeliverArgs& args, int ranks)
      : args_(args), received_(args.arrivals.base[ranks]), row_bytes_(args.hidden * size_of(args.dtype)) {}

  __device__ bool computes() const { return !args_.flat && (args_.weights || args_.dot_with); }
  /// Which row copy `lane` of received row j becomes; -1 if it has fewer, or is none.
  __device__ std::int32_t copy_of(int j) const {
    if (j >= received_) return -1;
    if (args_.flat) return warp_lane() == 0 ? j : -1;
    return warp_lane() < args_.arrivals.top_k ? rows_of(j)[warp_lane()] : -1;
  }
  __device__ char* out_or_null(std::int32_t row) const { return row < 0 ? nullptr : out(row); }

  /// Clears the rows of a warp's share that nothing fills.
  __device__ void pad(Range mine) const {
    for (int first = mine.begin; first < mine.end; first += 32) {
      const int row = first + warp_lane();
      const bool empty = row < mine.end && (args_.flat ? row >= received_ : args_.row_src[row] < 0);
      for (unsigned left = __ballot_sync(kAllLanes, empty); left != 0; left &= left - 1) {
        const int clear = first + __ffs(left) - 1;
        for (std::int64_t i = warp_lane(); i < row_bytes_ / kVectorBytes; i += 32)
          store_vector(out(clear), static_cast<int>(i), {0, 0, 0, 0});
        if (args_.dot_with && warp_lane() == 0) args_.dots[clear] = 0.0f;
      }
    }
  }

  /// Weights and dots `bytes` of received row j, which lie at `piece` and begin `offset` bytes into it. `sums`: of the
  /// row's dots so far, by slot; pieces come in order and begin at multiples of 128 bytes.
  __device__ void place_piece(int j, const char* piece, int offset, int bytes, float* sums) const {
    for (int k = 0; k < args_.arrivals.top_k; ++k) {
      const std::int32_t to = rows_of(j)[k];
      if (to < 0) continue;
      with_dtype(args_.dtype, [&](auto dtype) {
        constexpr DType D = decltype(dtype)::value;
        scale<D>(out(to) + offset, piece, bytes, args_.weights ? args_.weights[to] : 1.0f);
        if (!args_.dot_with) return;
        const char* const other = static_cast<const char*>(args_.dot_with) + to * row_bytes_ + offset;
        sums[k] = dot<D>(sums[k], other, piece, bytes);
        if (offset + bytes == row_bytes_) store_dot(to, sums[k]);
      });
    }
  }

 private:
  __device__ char* out(std::int64_t row) const { return static_cast<char*>(args_.out) + row * row_bytes_; }
  __device__ const std::int32_t* rows_of(int j) const {
    return args_.arrivals.rows + static_cast<std::int64_t>(j) * args_.arrivals.top_k;
  }
  template <DType D>
  __device__ void scale(char* to, const char* from, int bytes, float weight) const {
    for (int i = warp_lane(); i < bytes / kVectorBytes; i += 32) {
      uint4 vector = reinterpret_cast<const uint4*>(from)[i];
      if (!args_.weights) {
        store_vector(to, i, vector);
        continue;
      }
      float x[kVector<D>];
      widen<D>(x, vector);
#pragma unroll
      for (float& value : x) value = weight * value;
      store_packed(to, i, round_to<D>(x));
    }
  }
  /// The order of ops/rows.h: element h adds to lane h % 32, then lanes fold by halves.
  template <DType D>
  __device__ float dot(float sum, const char* a, const char* b, int bytes) const {
    const int elements = bytes / (D == DType::f32 ? 4 : 2);
#pragma unroll 8
    for (int h = warp_lane(); h < elements; h += 32) sum = sum + element<D>(a, h) * element<D>(b, h);
    return sum;
  }
  template <DType D>
  __device__ static float element(const char* row, int h) {
    if constexpr (D == DType::f32) return reinterpret_cast<const float*>(row)[h];
    const std::uint16_t bits = reinterpret_cast<const std::uint16_t*>(row)[h];
    return D == DType::bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
  }
  __device__ void store_dot(std::int32_t to, float sum) const {
    for (int half = 16; half > 0; half /= 2) sum = sum + __shfl_down_sync(kAllLanes, sum, half);
    if (warp_lane() == 0) args_.dots[to] = canonical(sum);
  }

  const DeliverArgs& args_;
  int received_;
  std::int64_t row_bytes_;
};

/// Rows that are only copied: the copy engine stores them out of their stage. Where the next row goes is fetched while
/// this one is under way.
class CopyRows {
 public:
  __device__ CopyRows(const DevicePlace& to, RingWarp<StoreEach>& mover) : to_(to), mover_(mover) {}
  __device__ void place(int j, const void* row, const void*) {
    const std::int32_t copy = j == next_ ? next_copy_ : to_.copy_of(j);
    next_ = j + 1, next_copy_ = to_.copy_of(next_);
    mover_.move(row, to_.out_or_null(copy));
  }

 private:
  const DevicePlace& to_;
  RingWarp<StoreEach>& mover_;
  int next_ = -1;
  std::int32_t next_copy_ = -1;
};

/// Rows that are weighted or dotted: the warp reads them in their stage.
class ComputeEach {
 public:
  using Place = int;  // the received row
  __device__ explicit ComputeEach(const DevicePlace& to) : to_(to) {}
  __device__ void operator()(Ring& ring, const char* stage, int j, int offset, int bytes) {
    if (offset == 0)
      for (float& sum : sums_) sum = 0.0f;
    to_.place_piece(j, stage, offset, bytes, sums_);
    ring.skip();
  }

 private:
  const DevicePlace& to_;
  float sums_[kMaxTopK];
};
struct ComputeRows {
  RingWarp<ComputeEach>& mover;
  __device__ void place(int j, const void* row, const void*) const { mover.move(row, j); }
};

/// Partial sums that only travel.
struct PushRows {
  const CollectArgs& args;
  RingWarp<StoreEach>& mover;
  __device__ void partial(int j, int, void* to) const {
    const std::int64_t row_bytes = args.hidden * size_of(args.dtype);
    mover.move(static_cast<const char*>(args.y) + j * row_bytes,
               warp_lane() == 0 ? static_cast<char*>(to) : nullptr);
  }
};

/// The terms of a sum, one a lane: term i is on lane i.
struct Terms {
  const void* row = nullptr;
  float weight = 1.0f;
  unsigned ends = 0;  // bit i, alike on all lanes: a group ends with term i; none: one group
  int count = 0;
};

/// Adds the terms of a row, whose vectors are `columns`; what a group adds up to is rounded to `group_dtype`. A sum
/// starts from -0, to which adding a first term changes nothing. Not inlined: the crews' own state stays out of its
/// registers.
template <DType In, DType Out, bool kGroups>
__device__ __noinline__ void add_terms(const Terms& terms, int columns, char* to, DType group_dtype) {
  constexpr int kWidth = kVector<In>, kHalves = kGroups ? 1 : 2, kAtOnce = 4;  // vectors and terms of a lane
  for (int first = 0; first < columns; first += 32 * kHalves) {
    float sum[kHalves][kWidth], total[kGroups ? kWidth : 1];
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
#pragma unroll
      for (float& value : sum[half]) value = terms.count == 0 ? 0.0f : -0.0f;
#pragma unroll
    for (float& value : total) value = -0.0f;
    for (int begin = 0; begin < terms.count; begin += kAtOnce) {
      uint4 vector[kAtOnce][kHalves];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const auto* const row = reinterpret_cast<const uint4*>(
            __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(terms.row), begin + i));
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          const int column = first + 32 * half + warp_lane();
          if (begin + i < terms.count && column < columns) vector[i][half] = row[column];
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float weight = __shfl_sync(kAllLanes, terms.weight, begin + i);
        if (begin + i >= terms.count) continue;
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          float x[kWidth];
          widen<In>(x, vector[i][half]);
#pragma unroll
          for (int e = 0; e < kWidth; ++e) sum[half][e] = sum[half][e] + weight * x[e];
        }
        if constexpr (kGroups) {
          if ((terms.ends >> (begin + i) & 1) == 0) continue;
#pragma unroll
          for (int e = 0; e < kWidth; ++e) {
            total[e] = total[e] + rounded(group_dtype, sum[0][e]);
            sum[0][e] = -0.0f;
          }
        }
      }
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int column = first + 32 * half + warp_lane();
      if (column >= columns) continue;
      if constexpr (kGroups)
        store_packed(to, column, round_to<Out>(total));
      else
        store_packed(to, column, round_to<Out>(sum[half]));
    }
  }
}

/// Adds rows: expert rows to a partial sum, partial sums to a domain's, either to a token's result.
class DeviceAdd {
 public:
  __device__ explicit DeviceAdd(const CollectArgs& args) : args_(args) {}

  __device__ void partial(int j, int, void* to) const {
    const std::int64_t y_bytes = args_.hidden * size_of(args_.dtype);
    const char* const y = static_cast<const char*>(args_.y);
    if (!args_.flat) return add(args_.dtype, args_.wire, expert_rows(j, y, y_bytes), to);
    if (args_.dtype == args_.wire) return WarpMem::copy(to, y + j * y_bytes, y_bytes);
    add(args_.dtype, args_.wire, {y + j * y_bytes, 1.0f, 0, 1}, to);
  }
  __device__ void domain_sum(const void* const* terms, int count, void* to) const {
    add(args_.wire, args_.wire, {warp_lane() < count ? terms[warp_lane()] : nullptr, 1.0f, 0, count}, to);
  }
  __device__ void home(int token, const void* const* terms, const int* ranks, int count) const {
    Terms mine{nullptr, 1.0f, 0, count};
    bool ends = false;
    if (warp_lane() < count) {
      mine.row = terms[warp_lane()];
      ends = args_.nest > 0 && (warp_lane() + 1 == count ||
                                ranks[warp_lane()] / args_.nest != ranks[warp_lane() + 1] / args_.nest);
    }
    mine.ends = __ballot_sync(kAllLanes, ends);
    add(args_.wire, args_.out_dtype, mine,
        static_cast<char*>(args_.z) + token * args_.hidden * size_of(args_.out_dtype));
  }

 private:
  /// The rows of received row j by ascending row, which is (expert, slot) order.
  __device__ Terms expert_rows(int j, const char* y, std::int64_t y_bytes) const {
    const int top_k = args_.arrivals.top_k;
    const std::int64_t slot = static_cast<std::int64_t>(j) * top_k + warp_lane();
    const std::int32_t row = warp_lane() < top_k ? args_.arrivals.rows[slot] : -1;
    const float weight = row >= 0 && args_.part_weights ? args_.part_weights[slot] : 1.0f;
    int turn = -1, count = 0;
    for (int k = 0; k < top_k; ++k) {
      const std::int32_t other = __shfl_sync(kAllLanes, row, k);
      if (other < 0) continue;
      ++count;
      if (row >= 0 && other <= row) ++turn;
    }
    int from = 0;  // the lane that has my term
    for (int i = 0; i < count; ++i) {
      const int lane = __ffs(__ballot_sync(kAllLanes, turn == i)) - 1;
      if (warp_lane() == i) from = lane;
    }
    const std::int64_t at = __shfl_sync(kAllLanes, row, from);
    return {y + at * y_bytes, __shfl_sync(kAllLanes, weight, from), 0, count};
  }

  __device__ void add(DType in, DType out, const Terms& terms, void* to) const {
    with_dtype(in, [&](auto from) {
      with_dtype(out, [&](auto into) {
        constexpr DType In = decltype(from)::value, Out = decltype(into)::value;
        const int columns = static_cast<int>(args_.hidden / kVector<In>);
        if (terms.ends != 0)
          add_terms<In, Out, true>(terms, columns, static_cast<char*>(to), args_.wire);
        else
          add_terms<In, Out, false>(terms, columns, static_cast<char*>(to), args_.wire);
      });
    });
  }

  const CollectArgs& args_;
};

}  // namespace flexep
