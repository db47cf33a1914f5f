// Sums whose terms a feeder brings to warps that only add: 32 terms of some sums at a time, a lane each, so that the
// instructions of one piece are not behind those of another.
#pragma once
#include <cstdint>

#include "kernels/args.h"
#include "kernels/collect.h"
#include "kernels/device_sums.cuh"

namespace flexep {

/// Which sums are fed, and in which order. Not groups of terms (CollectCrews::adds_groups).
template <DType In>
class FedRows {
 public:
  __device__ FedRows(const CollectArgs& args, FeedMover<TermPiece>& mover, DType out)
      : args_(args),
        mover_(mover),
        out_size_(size_of(out)),
        row_bytes_(static_cast<int>(args.hidden * size_of(In))),
        out_bytes_(args.hidden * out_size_) {}

  /// The partial sums of received rows: expert rows by ascending row, which is (expert, slot) order, or a flat row
  /// alone. A token's sum goes to at(token) in the window of `owner`.
  template <class At>
  __device__ void partials(Range mine, const std::int32_t* token, int owner, const At& at) {
    const int slots = args_.flat ? 1 : args_.arrivals.top_k;
    const Groups groups(slots);
    const auto fetch = [&](int first) {
      const int j = first + groups.group();
      const bool here = j < mine.end;
      Received got{here, here ? token[j] : 0, -1, 1.0f};
      if (here && groups.place() < slots) {
        const std::int64_t slot = static_cast<std::int64_t>(j) * slots + groups.place();
        got.row = args_.flat ? j : args_.arrivals.rows[slot];
        if (!args_.flat && args_.part_weights) got.weight = args_.part_weights[slot];
      }
      return got;
    };
    mover_.count_rows(owner, mine.end - mine.begin, out_bytes_);
    Received next = fetch(mine.begin);
    for (int j = mine.begin; j < mine.end; j += groups.count) {
      const Received now = next;
      next = fetch(j + groups.count);  // under way while these are fed
      const int turn = turn_of(groups, slots, now.row);
      char* const to = now.here ? mover_.address(owner, at(now.token)) : nullptr;
      feed(groups, now.here, now.row >= 0, turn, row_of_y(now.row), now.weight, to);
    }
  }

  /// Partial sums that have come home, by ascending ring; see add_tokens. Own ones have come too, or are rows of y.
  template <class RingOf, class At>
  __device__ void homes(const MoverWarp& lanes, Range mine, int me, bool are_rows, const RingOf& ring_of,
                        const At& at) {
    const Groups groups(args_.arrivals.top_k);
    std::int32_t next = home_rank(groups, mine.begin, mine);
    // The rows of y of the next 32 tokens of mine that have one.
    const int end = are_rows ? args_.arrivals.base[me + 1] : 0;
    const auto fetch_own = [&](int from) {
      const int received = from + warp_lane();
      return args_.flat ? received : received < end ? args_.arrivals.rows[received] : -1;
    };
    int received = are_rows && mine.begin < mine.end ? first_own(lanes, args_, me, mine.begin) : 0;
    std::int32_t next_own = are_rows ? fetch_own(received) : -1;
    for (int first = mine.begin; first < mine.end; first += groups.count) {
      const int token = first + groups.group(), rank = next;
      next = home_rank(groups, first + groups.count, mine);
      const bool is_own = are_rows && rank == me;
      const unsigned owns = __ballot_sync(kAllLanes, is_own);
      const std::int32_t row = __shfl_sync(kAllLanes, next_own, __popc(owns & groups.below()));
      if (are_rows) received += __popc(owns), next_own = fetch_own(received);
      const int ring = rank < 0 ? -1 : ring_of(rank), before = __shfl_up_sync(kAllLanes, ring, 1);
      const bool is_term =
          ring >= 0 && (groups.place() == 0 || ring != before);  // else its domain has added it
      const unsigned terms = __ballot_sync(kAllLanes, is_term);
      const char* const from = is_own    ? row_of_y(row)
                               : is_term ? mover_.address(me, at(token, ring))
                                         : nullptr;
      feed(groups, token < mine.end, is_term, __popc(terms & groups.lanes() & groups.below()), from, 1.0f,
           z_of(token));
    }
  }

  /// The same where own ones are added here: first the expert rows of a token by ascending row, then what others have
  /// sent. These are as many terms as the token has slots, at most, so that each has a lane.
  template <class RingOf, class At>
  __device__ void homes_and_own(const MoverWarp& lanes, Range mine, int me, const RingOf& ring_of,
                                const At& at) {
    const int slots = args_.arrivals.top_k, end = args_.arrivals.base[me + 1];
    const Groups groups(slots);
    std::int32_t next = home_rank(groups, mine.begin, mine);
    // The slots of the next tokens of mine that are received here, one for each group.
    const auto fetch_own = [&](int from) {
      const int received = from + groups.group();
      const std::int64_t slot = static_cast<std::int64_t>(received) * slots + groups.place();
      Slot own{-1, 1.0f};
      if (received < end && groups.place() < slots) {
        own.row = args_.arrivals.rows[slot];
        if (args_.part_weights) own.weight = args_.part_weights[slot];
      }
      return own;
    };
    int received = mine.begin < mine.end ? first_own(lanes, args_, me, mine.begin) : 0;
    Slot next_own = fetch_own(received);
    for (int first = mine.begin; first < mine.end; first += groups.count) {
      const int token = first + groups.group(), rank = next;
      next = home_rank(groups, first + groups.count, mine);
      const unsigned owns = __ballot_sync(kAllLanes, rank == me), owned = owns & groups.lanes();
      const int lane = __popc(owns & groups.before()) * groups.width + groups.place();
      Slot own{__shfl_sync(kAllLanes, next_own.row, lane & 31),
               __shfl_sync(kAllLanes, next_own.weight, lane & 31)};
      if (owned == 0) own.row = -1;
      received += __popc(owns), next_own = fetch_own(received);
      const int turn = turn_of(groups, slots, own.row);
      const int count = __popc(__ballot_sync(kAllLanes, own.row >= 0) & groups.lanes());
      const int all = count + __popc(__ballot_sync(kAllLanes, rank >= 0 && rank != me) & groups.lanes());
      // The term whose turn is this lane's place.
      Slot term{-1, 1.0f};
      for (int place = 0; place < slots; ++place) {
        const int from = groups.first() + place;
        const Slot there{__shfl_sync(kAllLanes, own.row, from), __shfl_sync(kAllLanes, own.weight, from)};
        if (__shfl_sync(kAllLanes, turn, from) == groups.place() && there.row >= 0) term = there;
      }
      const int other = groups.place() - count, mine_at = owned ? __ffs(owned) - 1 - groups.first() : slots;
      const int writer = __shfl_sync(kAllLanes, rank, (groups.first() + other + (mine_at <= other)) & 31);
      const bool is_own = groups.place() < count, is_term = groups.place() < all;
      const char* const from = is_own    ? row_of_y(term.row)
                               : is_term ? mover_.address(me, at(token, ring_of(writer)))
                                         : nullptr;
      feed(groups, token < mine.end, is_term, groups.place(), from, is_own ? term.weight : 1.0f, z_of(token),
           count);
    }
  }

 private:
  struct Slot {
    std::int32_t row;  // -1: empty, or elsewhere
    float weight;
  };
  struct Received {
    bool here;
    std::int32_t token, row;  // row: of this lane's slot, or -1
    float weight;
  };
  /// Lanes side by side have the slots of one sum, a power of two of them.
  struct Groups {
    int width, count;

    __device__ explicit Groups(int slots) : width(1) {
      while (width < slots) width *= 2;
      count = 32 / width;
    }
    __device__ int group() const { return warp_lane() / width; }
    __device__ int place() const { return warp_lane() & (width - 1); }
    __device__ int first() const { return warp_lane() & ~(width - 1); }
    /// Of this lane's group; and all before this lane, or before its group.
    __device__ unsigned lanes() const { return (width == 32 ? kAllLanes : (1u << width) - 1) << first(); }
    __device__ unsigned below() const { return (1u << warp_lane()) - 1; }
    __device__ unsigned before() const { return (1u << first()) - 1; }
  };

  __device__ const char* row_of_y(std::int32_t row) const {
    return static_cast<const char*>(args_.y) + static_cast<std::int64_t>(row) * row_bytes_;
  }
  __device__ char* z_of(int token) const { return static_cast<char*>(args_.z) + token * out_bytes_; }
  /// The rank of this lane's place, of the token of its group; -1: none.
  __device__ std::int32_t home_rank(const Groups& groups, int first, Range mine) const {
    const int slots = args_.arrivals.top_k, token = first + groups.group();
    const std::int64_t slot = static_cast<std::int64_t>(token) * slots + groups.place();
    return token < mine.end && groups.place() < slots ? args_.home_rank[slot] : -1;
  }
  /// Rows of the group that are below this lane's.
  __device__ static int turn_of(const Groups& groups, int slots, std::int32_t row) {
    int turn = 0;
    for (int place = 0; place < slots; ++place) {
      const std::int32_t other = __shfl_sync(kAllLanes, row, groups.first() + place);
      turn += other >= 0 && other < row;
    }
    return turn;
  }

  /// Feeds a sum for each group that is `here`: its lanes that have a term, in their turns. The first `own` of them, if
  /// there are some, are a partial sum.
  __device__ void feed(const Groups& groups, bool here, bool has, int turn, const char* from, float weight,
                       char* to, int own = 0) const {
    const unsigned terms = __ballot_sync(kAllLanes, has);
    const int count = __popc(terms & groups.lanes()), ahead = __popc(terms & groups.before());
    for (unsigned left = __ballot_sync(kAllLanes, here && count == 0 && groups.place() == 0); left != 0;
         left &= left - 1)
      clear_row(reinterpret_cast<char*>(
                    __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(to), __ffs(left) - 1)),
                out_bytes_);
    // A piece of every term of a sum, then the next piece. Lanes meet before they load, so they ask for half of the
    // ring at a time, and the other half is under way meanwhile.
    const int at_once = (mover_.stages() + 1) / 2;
    const int most = mover_.piece_bytes(), pieces = ceil_div(row_bytes_, most), all = pieces * __popc(terms);
    for (int begin = 0, some; begin < all; begin += some) {
      some = min(all - begin, at_once);
      for (int piece = 0; piece < pieces; ++piece) {
        const int number = ahead * pieces + piece * count + turn - begin, offset = piece * most;
        if (!has || number < 0 || number >= some) continue;
        const int bytes = min(most, row_bytes_ - offset);
        mover_.move_as(number, from + offset, bytes,
                       {to + offset / size_of(In) * out_size_, bytes / kVectorBytes, weight, turn == 0,
                        turn + 1 == count, turn + 1 == own});
      }
      mover_.moved_many(some);
    }
  }

  const CollectArgs& args_;
  FeedMover<TermPiece>& mover_;
  const int out_size_, row_bytes_;
  const std::int64_t out_bytes_;
};

/// Of lanes that wait or post, which move nothing.
struct NoRows {};

/// See collect.h.
template <DType In, class Mem, class At>
__device__ __forceinline__ void add_received(const MoverWarp&, FedRows<In>& row, Mem&, Range mine,
                                             const std::int32_t* token, int owner, const At& at,
                                             std::size_t) {
  row.partials(mine, token, owner, at);
}
template <DType In, class Mem, class RingOf, class At>
__device__ __forceinline__ void add_tokens(const MoverWarp& lanes, FedRows<In>& row, Mem&, int me, Range mine,
                                           const CollectArgs&, OwnSums own, const RingOf& ring_of,
                                           const At& at, std::size_t) {
  if (own == OwnSums::added_at_home)
    row.homes_and_own(lanes, mine, me, ring_of, at);
  else
    row.homes(lanes, mine, me, own == OwnSums::are_rows, ring_of, at);
}
template <class Mem, class At>
__device__ __forceinline__ void add_received(const MoverWarp&, NoRows&, Mem&, Range, const std::int32_t*, int,
                                             const At&, std::size_t) {}
template <class Mem, class RingOf, class At>
__device__ __forceinline__ void add_tokens(const MoverWarp&, NoRows&, Mem&, int, Range, const CollectArgs&,
                                           OwnSums, const RingOf&, const At&, std::size_t) {}

}  // namespace flexep
