// What the device's roles do with a row where a lane is a warp: the row functors, a row at a time. The same bits as
// host_rows.h.
#pragma once
#include <climits>
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

/// Shared memory of a CTA that is zero, for bulk stores.
struct Zeros {
  static constexpr int kBytes = 7168;

  alignas(128) char bytes[kBytes];

  /// By all threads, which meet before anybody stores them.
  __device__ void clear() {
    for (int i = static_cast<int>(threadIdx.x); i < kBytes / kVectorBytes; i += static_cast<int>(blockDim.x))
      reinterpret_cast<uint4*>(bytes)[i] = {0, 0, 0, 0};
    ptx::fence_proxy_async_shared_cta();
  }
};

/// Whose rows a warp weights, dots or copies, and where they go.
class DevicePlace {
 public:
  __device__ DevicePlace(const DeliverArgs& args, int ranks)
      : args_(args),
        out_(static_cast<char*>(args.out)),
        rows_(args.arrivals.rows),
        row_bytes_(args.hidden * size_of(args.dtype)),
        received_(args.arrivals.base[ranks]),
        top_k_(args.flat ? 0 : args.arrivals.top_k) {}

  __device__ bool computes() const { return !args_.flat && (args_.weights || args_.dot_with); }
  /// Which row copy `lane` of received row j becomes; -1 if it has fewer, or is none.
  __device__ std::int32_t copy_of(int j) const {
    if (j >= received_) return -1;
    if (top_k_ == 0) return warp_lane() == 0 ? j : -1;
    return warp_lane() < top_k_ ? rows_of(j)[warp_lane()] : -1;
  }
  __device__ char* out_or_null(std::int32_t row) const { return row < 0 ? nullptr : out(row); }

  /// Clears the rows that nothing fills, by bulk stores out of `zeros`: next to those of the rows, ordinary stores hardly
  /// get their turn. One row is on its way while the next one is sent after it. Rows are dealt to `warps`, those of all
  /// CTAs, like cards: most of them lie side by side, behind all that are filled.
  __device__ void pad(const Lane& warps, const Zeros& zeros) const {
    for (std::int64_t dealt = warps.rank(); dealt < args_.num_rows; dealt += 32 * warps.size()) {
      const std::int64_t row = dealt + warp_lane() * warps.size();
      const bool empty = row < args_.num_rows && (args_.flat ? row >= received_ : args_.row_src[row] < 0);
      for (unsigned left = __ballot_sync(kAllLanes, empty); left != 0; left &= left - 1) {
        const std::int64_t clear = dealt + (__ffs(left) - 1) * warps.size();
        if (warp_lane() != 0) continue;
        for (std::int64_t at = 0; at < row_bytes_; at += Zeros::kBytes)
          ptx::bulk_store(out(clear) + at, zeros.bytes,
                          static_cast<int>(min(row_bytes_ - at, static_cast<std::int64_t>(Zeros::kBytes))));
        ptx::bulk_commit_group();
        ptx::bulk_wait_group_read<1>();
        if (args_.dot_with) args_.dots[clear] = 0.0f;
      }
    }
    ptx::bulk_wait_group<0>();
  }

  /// Weights and dots `bytes` of received row j, which lie at `piece` and begin `offset` bytes into it. `sums`: of the
  /// row's dots so far, by slot; pieces come in order and begin at multiples of 128 bytes.
  __device__ void place_piece(int j, const char* piece, int offset, int bytes, float* sums) const {
    for (int k = 0; k < top_k_; ++k) {
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
  __device__ char* out(std::int64_t row) const { return out_ + row * row_bytes_; }
  __device__ const std::int32_t* rows_of(int j) const {
    return rows_ + static_cast<std::int64_t>(j) * top_k_;
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
  // What every row needs, by value.
  char* out_;
  const std::int32_t* rows_;
  std::int64_t row_bytes_;
  int received_, top_k_;  // top_k: 0 if flat
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
  const DevicePlace to_;
  RingWarp<StoreEach>& mover_;
  int next_ = -1;
  std::int32_t next_copy_ = -1;
};

/// Rows that are weighted or dotted: the warp reads them in their stage.
class ComputeEach {
 public:
  using Place = int;  // the received row
  template <int N>
  using Places = Uniform<Place, N>;

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
  const char* y;
  std::int64_t row_bytes;
  RingWarp<StoreEach>& mover;
  __device__ void partial(int j, int, void* to) const {
    mover.move(y + j * row_bytes, warp_lane() == 0 ? static_cast<char*>(to) : nullptr);
  }
};

/// The terms of a sum, one a lane: term i is on lane i.
struct Terms {
  const char* row = nullptr;
  float weight = 1.0f;
  unsigned ends = 0;  // bit i, alike on all lanes: a group ends with term i
  int count = 0;
};

/// Sums of pieces of rows, in registers: of a piece's vectors a lane has those with number `lane`, lane + kLanes, ... A
/// sum starts from -0, to which adding a first term changes nothing.
template <DType In, int kVectors, int kLanes>
class Sums {
 public:
  __device__ explicit Sums(int lane) : lane_(lane) { clear(); }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& vector : sums_)
#pragma unroll
      for (float& value : vector) value = -0.0f;
  }
  /// Whether vector v of this lane is one of a piece's `count`.
  __device__ __forceinline__ bool has(int v, int count) const { return v * kLanes < count - lane_; }
  template <class Weigh>
  __device__ __forceinline__ void add(int v, const uint4& vector, const Weigh& weigh) {
    float x[kWidth];
    widen<In>(x, vector);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) sums_[v][e] = sums_[v][e] + weigh(x[e]);
  }
  __device__ void add_rounded(const Sums& group) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sums_[v][e] = sums_[v][e] + rounded(In, group.sums_[v][e]);
  }
  __device__ __forceinline__ void store(DType out, char* row, int offset, int bytes) const {
    with_dtype(out, [&](auto dtype) {
      constexpr DType Out = decltype(dtype)::value;
      constexpr int kOutBytes = kWidth * (Out == DType::f32 ? 4 : 2);
      char* const to = row + offset / size_of(In) * size_of(Out) + lane_ * kOutBytes;
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
        if (has(v, bytes / kVectorBytes))
          store_packed(to + v * kLanes * kOutBytes, 0, round_to<Out>(sums_[v]));
    });
  }

 private:
  static constexpr int kWidth = kVector<In>;

  const int lane_;
  float sums_[kVectors][kWidth];
};

/// Zeros to a row that has no terms, by a warp.
__device__ inline void clear_row(char* row, std::int64_t bytes) {
  for (std::int64_t i = warp_lane(); i < bytes / kVectorBytes; i += 32)
    store_vector(row, static_cast<int>(i), {0, 0, 0, 0});
}

/// A warp adds by ordinary loads, piece by piece: a lane has kVectors of a piece, and kAtOnce terms of it are loaded
/// together. kGroups: what a group of terms adds up to is rounded to In, and groups are added.
template <DType In, bool kGroups, int kVectors, int kAtOnce>
class LaneAdder {
 public:
  __device__ LaneAdder(std::int64_t hidden, DType out)
      : row_bytes_(static_cast<int>(hidden * size_of(In))), out_bytes_(hidden * size_of(out)), out_(out) {}

  __device__ void add(const Terms& terms, void* to) const {
    if (terms.count == 0) return clear_row(static_cast<char*>(to), out_bytes_);
    for (int offset = 0; offset < row_bytes_; offset += kPieceBytes) {
      const int bytes = min(kPieceBytes, row_bytes_ - offset);
      Sums<In, kVectors, 32> sums(warp_lane()), groups = sums;
      for (int begin = 0; begin < terms.count; begin += kAtOnce) {
        uint4 vectors[kAtOnce][kVectors];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const auto row = reinterpret_cast<const char*>(
              __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(terms.row), begin + i));
          if (begin + i >= terms.count) break;
#pragma unroll
          for (int v = 0; v < kVectors; ++v)
            vectors[i][v] = sums.has(v, bytes / kVectorBytes)
                                ? reinterpret_cast<const uint4*>(row + offset)[32 * v + warp_lane()]
                                : uint4{0, 0, 0, 0};
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (begin + i >= terms.count) break;
#pragma unroll
          for (int v = 0; v < kVectors; ++v) sums.add(v, vectors[i][v], [](float x) { return x; });
          if constexpr (kGroups)
            if (terms.ends >> (begin + i) & 1) groups.add_rounded(sums), sums.clear();
        }
      }
      (kGroups ? groups : sums).store(out_, static_cast<char*>(to), offset, bytes);
    }
  }

 private:
  static constexpr int kPieceBytes = kVectors * 32 * kVectorBytes;

  const int row_bytes_;
  const std::int64_t out_bytes_;
  const DType out_;
};

/// A piece of a term, on its way to the warps that add it: a piece of every term of a sum, then the next piece.
struct TermPiece {
  char* to;  // the row that the sum becomes
  int offset, bytes;
  float weight;
  bool last;  // term of the sum
};
constexpr int kPieceVectors = 7;  // of a lane
constexpr int kMostPieceBytes = kPieceVectors * FedTeam::kReaderLanes * kVectorBytes;

/// One of the warps that add what a feeder brings; returns at its end. What it keeps over a piece must fit its
/// registers: beside the rings hardly any first-level cache is left for what is spilled.
template <DType In, bool kWeighted>
__device__ __forceinline__ void add_pieces(Reader<TermPiece>& reader, const FedTeam& team, DType out) {
  constexpr int kLanes = FedTeam::kReaderLanes;
  Sums<In, kPieceVectors, kLanes> sums(team.lane());
  for (TermPiece piece; reader.next(piece);) {
    const auto* const mine = reinterpret_cast<const uint4*>(reader.piece()) + team.lane();
    const int count = piece.bytes / kVectorBytes;
    const auto add = [&](int v, const uint4& vector) {
      sums.add(v, vector, [&](float x) { return kWeighted ? piece.weight * x : x; });
    };
    if (count == kPieceVectors * kLanes) {
#pragma unroll
      for (int v = 0; v < kPieceVectors; ++v) add(v, mine[v * kLanes]);
    } else {
#pragma unroll
      for (int v = 0; v < kPieceVectors; ++v)
        if (sums.has(v, count)) add(v, mine[v * kLanes]);
    }
    if (piece.last) {
      sums.store(out, piece.to, piece.offset, piece.bytes);
      sums.clear();
    }
    reader.pass();
  }
}

/// Feeds such warps. Groups of terms are not for them (CollectCrews::adds_groups).
class FeedAdder {
 public:
  __device__ FeedAdder(FeedMover<TermPiece>& mover, std::int64_t row_bytes, std::int64_t out_bytes)
      : mover_(mover), row_bytes_(static_cast<int>(row_bytes)), out_bytes_(out_bytes) {}

  __device__ void add(const Terms& terms, void* to) const {
    char* const row = static_cast<char*>(to);
    if (terms.count == 0) return clear_row(row, out_bytes_);
    const int most = mover_.piece_bytes();
    for (int offset = 0; offset < row_bytes_; offset += most)
      for (int i = 0; i < terms.count; ++i) {
        const auto term = reinterpret_cast<const char*>(
            __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(terms.row), i));
        const float weight = __shfl_sync(kAllLanes, terms.weight, i);
        const int bytes = min(most, row_bytes_ - offset);
        mover_.move(term + offset, bytes, {row, offset, bytes, weight, i + 1 == terms.count});
      }
  }

 private:
  FeedMover<TermPiece>& mover_;
  const int row_bytes_;
  const std::int64_t out_bytes_;
};

/// Of lanes that wait or post, which move nothing.
struct NoAdder {
  __device__ void add(const Terms&, void*) const {}
};

/// Which rows are added, by `adder`: expert rows to a partial sum, partial sums to a domain's, either to a token's
/// result.
template <DType In, class Adder>
class SumRows {
 public:
  __device__ SumRows(const CollectArgs& args, const Adder& adder) : args_(args), adder_(adder) {}

  __device__ void partial(int j, int next, void* to) {
    const char* const y = static_cast<const char*>(args_.y);
    const std::int64_t y_bytes = args_.hidden * size_of(In);
    if (args_.flat) return adder_.add({y + j * y_bytes, 1.0f, 0, 1}, to);
    const std::int32_t row = j == next_ ? next_row_ : row_of(j);
    next_ = next, next_row_ = next < 0 ? -1 : row_of(next);  // under way while this one is added
    adder_.add(expert_rows(j, row, y, y_bytes), to);
  }
  __device__ void domain_sum(const void* const* terms, int count, void* to) {
    adder_.add({term_of_lane(terms, count), 1.0f, 0, count}, to);
  }
  __device__ void home(int token, const void* const* terms, const int* ranks, int count) {
    Terms mine{term_of_lane(terms, count), 1.0f, 0, count};
    if (args_.nest > 0) {
      bool ends = false;
      if (warp_lane() < count)
        ends = warp_lane() + 1 == count ||
               ranks[warp_lane()] / args_.nest != ranks[warp_lane() + 1] / args_.nest;
      mine.ends = __ballot_sync(kAllLanes, ends);
    }
    adder_.add(mine, static_cast<char*>(args_.z) + token * args_.hidden * size_of(args_.out_dtype));
  }

 private:
  __device__ static const char* term_of_lane(const void* const* terms, int count) {
    return static_cast<const char*>(warp_lane() < count ? terms[warp_lane()] : nullptr);
  }
  /// Slot `lane` of received row j.
  __device__ std::int32_t row_of(int j) const {
    const int top_k = args_.arrivals.top_k;
    return warp_lane() < top_k ? args_.arrivals.rows[static_cast<std::int64_t>(j) * top_k + warp_lane()] : -1;
  }
  /// The rows of received row j by ascending row, which is (expert, slot) order.
  __device__ Terms expert_rows(int j, std::int32_t row, const char* y, std::int64_t y_bytes) const {
    const int top_k = args_.arrivals.top_k;
    const std::int64_t slot = static_cast<std::int64_t>(j) * top_k + warp_lane();
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

  const CollectArgs& args_;
  const Adder adder_;
  int next_ = -1;
  std::int32_t next_row_ = -1;
};

}  // namespace flexep
