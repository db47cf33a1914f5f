// How the device's roles add rows: one warp by ordinary loads, or a few that a feeder (device_fed.cuh) brings them to.
// The same bits as host_rows.h.
#pragma once
#include <cstdint>

#include "kernels/args.h"
#include "kernels/collect.h"
#include "kernels/device_lists.cuh"
#include "mem/cuda.cuh"
#include "ops/rows_vector.cuh"

namespace flexep {

/// The terms of a sum, one a lane: term i is on lane i.
struct Terms {
  const char* row = nullptr;
  unsigned ends = 0;  // bit i, alike on all lanes: a group ends with term i
  int count = 0;
};

/// Sums of pieces of rows, in registers: of a piece's vectors a lane has those with number `lane`, lane + kLanes, ... A
/// sum starts from -0, to which adding a first term changes nothing, or with that term.
template <DType In, int kVectors, int kLanes>
class Sums {
 public:
  __device__ explicit Sums(int lane) : lane_(lane) {}
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& vector : sums_)
#pragma unroll
      for (float& value : vector) value = -0.0f;
  }
  /// Whether vector v of this lane is one of a piece's `count`.
  __device__ __forceinline__ bool has(int v, int count) const { return v * kLanes < count - lane_; }
  /// kStart: the sum is that term.
  template <bool kStart, class Weigh>
  __device__ __forceinline__ void add(int v, const uint4& vector, const Weigh& weigh) {
    float x[kWidth];
    widen<In>(x, vector);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) sums_[v][e] = kStart ? weigh(x[e]) : sums_[v][e] + weigh(x[e]);
  }
  /// Adds a piece of `count` vectors, those of this lane at mine[v * kLanes].
  template <bool kStart, class Weigh>
  __device__ __forceinline__ void add_piece(const uint4* mine, int count, const Weigh& weigh) {
    by_some(count, [&](auto some) {
      constexpr int kFirst = decltype(some)::kFirst, kSome = decltype(some)::kCount;
      // Loaded together, so that memory is waited for once. What is added where the piece has none is stored nowhere.
      uint4 vectors[kSome];
#pragma unroll
      for (int i = 0; i < kSome; ++i)
        vectors[i] = has(kFirst + i, count) ? mine[(kFirst + i) * kLanes] : uint4{0, 0, 0, 0};
#pragma unroll
      for (int i = 0; i < kSome; ++i) add<kStart>(kFirst + i, vectors[i], weigh);
    });
  }
  __device__ void add_rounded(const Sums& group) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sums_[v][e] = sums_[v][e] + rounded(In, group.sums_[v][e]);
  }
  /// To what In can hold.
  __device__ __forceinline__ void round() {
    if constexpr (In != DType::f32)
#pragma unroll
      for (auto& vector : sums_)
#pragma unroll
        for (float& value : vector) value = rounded(In, value);
  }
  /// To where the piece's sum begins.
  __device__ __forceinline__ void store(DType out, char* to, int count) const {
    with_dtype(out, [&](auto dtype) {
      constexpr DType Out = decltype(dtype)::value;
      constexpr int kOutBytes = kWidth * (Out == DType::f32 ? 4 : 2);
      // Without a sign, so that lanes keep no upper halves of offsets in registers.
      char* const mine = to + static_cast<unsigned>(lane_) * kOutBytes;
      by_some(count, [&](auto some) {
        constexpr int kFirst = decltype(some)::kFirst, kSome = decltype(some)::kCount;
        // Rounded before any is stored, so that none waits for registers that another is stored from.
        Packed<Out, kWidth> packed[kSome];
#pragma unroll
        for (int i = 0; i < kSome; ++i) packed[i] = round_to<Out>(sums_[kFirst + i]);
#pragma unroll
        for (int i = 0; i < kSome; ++i)
          each_vector(mine + (kFirst + i) * kLanes * kOutBytes, packed[i], [&](char* at, auto vector) {
            ptx::store_streaming_if(has(kFirst + i, count), at, vector);
          });
      });
    });
  }

 private:
  static constexpr int kWidth = kVector<In>;
  static constexpr int kAtOnce = kVectors < 4 ? kVectors : 4;

  /// Neighbours among a lane's vectors.
  template <int kFirstOne, int kHowMany>
  struct Some {
    static constexpr int kFirst = kFirstOne, kCount = kHowMany;
  };
  /// Calls work(Some) for the first few vectors of a lane, and for the others if a piece of `count` has any.
  template <class Work>
  __device__ __forceinline__ static void by_some(int count, const Work& work) {
    work(Some<0, kAtOnce>{});
    if constexpr (kVectors > kAtOnce)
      if (count > kAtOnce * kLanes) work(Some<kAtOnce, kVectors - kAtOnce>{});
  }

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
      Sums<In, kVectors, 32> sums(warp_lane()), groups(warp_lane());
      sums.clear(), groups.clear();
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
          for (int v = 0; v < kVectors; ++v)
            sums.template add<false>(v, vectors[i][v], [](float x) { return x; });
          if constexpr (kGroups)
            if (terms.ends >> (begin + i) & 1) groups.add_rounded(sums), sums.clear();
        }
      }
      (kGroups ? groups : sums)
          .store(out_, static_cast<char*>(to) + offset / size_of(In) * size_of(out_), bytes / kVectorBytes);
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
  char* to;   // where the piece's sum begins
  int count;  // of its vectors
  float weight;
  bool first, last;  // term of the sum
  bool rounds;       // the sum so far is a partial sum, and is rounded as those that travel
};
constexpr int kPieceVectors = 7;  // of a lane
/// Warps that share a piece: few where rows are narrow, so that there are more teams of them.
constexpr int kWideReaders = 4, kNarrowReaders = 2;
/// Of a piece, at most.
FLEXEP_HD constexpr int piece_bytes(int readers) { return kPieceVectors * 32 * readers * kVectorBytes; }

/// One of the warps that add what a feeder brings; returns at its end. What it keeps over a piece must fit its
/// registers: beside the rings hardly any first-level cache is left for what is spilled.
template <DType In, bool kWeighted, int kReaders>
__device__ __noinline__ void add_pieces(Reader<TermPiece> reader, FedTeam team, DType out) {
  constexpr int kLanes = 32 * kReaders;
  Sums<In, kPieceVectors, kLanes> sums(team.lane());
  for (TermPiece piece; reader.next(piece);) {
    const auto* const mine = reinterpret_cast<const uint4*>(reader.piece()) + team.lane();
    const auto weigh = [&](float x) { return kWeighted ? piece.weight * x : x; };
    if (piece.first)
      sums.template add_piece<true>(mine, piece.count, weigh);
    else
      sums.template add_piece<false>(mine, piece.count, weigh);
    if (piece.rounds) sums.round();
    if (piece.last) sums.store(out, piece.to, piece.count);
    reader.pass();
  }
}

/// Which partial sums are added, by `adder`: to a domain's at its relay, or to a token's result at home.
template <DType In, class Adder>
class SumRows {
 public:
  __device__ SumRows(const CollectArgs& args, const Adder& adder) : args_(args), adder_(adder) {}

  __device__ void domain_sum(const void* const* terms, int count, void* to) {
    adder_.add({term_of_lane(terms, count), 0, count}, to);
  }
  /// See add_tokens: lane i has the token's i-th rank, and then its i-th term.
  template <class RingOf, class Term>
  __device__ void home(int token, int next, const RingOf& ring_of, const Term& term) {
    const std::int32_t rank = token == next_ ? next_rank_ : rank_of(token);
    next_ = next, next_rank_ = next < 0 ? -1 : rank_of(next);  // under way while this one is added
    int ring = rank < 0 ? -1 : ring_of(rank);
    const int before = __shfl_up_sync(kAllLanes, ring, 1);
    const unsigned terms = __ballot_sync(kAllLanes, ring >= 0 && (warp_lane() == 0 || ring != before));
    const int count = __popc(terms);
    if ((terms & (terms + 1)) != 0)  // some lie apart
      ring = __shfl_sync(kAllLanes, ring, warp_lane() < count ? __fns(terms, 0, warp_lane() + 1) : 0);
    const bool has = warp_lane() < count;
    Terms mine{has ? static_cast<const char*>(term(token, ring)) : nullptr, 0, count};
    if (args_.nest > 0) {
      const int after = __shfl_down_sync(kAllLanes, ring, 1);
      mine.ends = __ballot_sync(kAllLanes,
                                has && (warp_lane() + 1 == count || ring / args_.nest != after / args_.nest));
    }
    adder_.add(mine, static_cast<char*>(args_.z) + token * args_.hidden * size_of(args_.out_dtype));
  }

 private:
  __device__ static const char* term_of_lane(const void* const* terms, int count) {
    return static_cast<const char*>(warp_lane() < count ? terms[warp_lane()] : nullptr);
  }
  /// The token's rank that is this lane's.
  __device__ std::int32_t rank_of(int token) const {
    const int top_k = args_.arrivals.top_k;
    return warp_lane() < top_k ? args_.home_rank[static_cast<std::int64_t>(token) * top_k + warp_lane()] : -1;
  }

  const CollectArgs& args_;
  const Adder adder_;
  int next_ = -1;
  std::int32_t next_rank_ = -1;
};

/// See collect.h. All are pushed where sums are rounded in between.
template <DType In, class Adder, class Mem, class RingOf, class At>
__device__ __forceinline__ void add_tokens(const MoverWarp&, SumRows<In, Adder>& row, Mem& mem, int me,
                                           Range mine, const CollectArgs&, OwnSums, const RingOf& ring_of,
                                           const At& at, std::size_t row_bytes) {
  for (int token = mine.begin; token < mine.end; ++token)
    row.home(token, token + 1 < mine.end ? token + 1 : -1, ring_of,
             [&](int of, int ring) { return mem.view(me, at(of, ring), row_bytes); });
}

}  // namespace flexep
