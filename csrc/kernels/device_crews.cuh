// The crews of a rank's CTA: which warps wait, move and post for which role of an operation, and what their movers are.
#pragma once
#include <cstdint>

#include "base/error.h"
#include "kernels/deliver.h"
#include "kernels/device_fed.cuh"
#include "kernels/device_rows.cuh"

namespace flexep {

/// How a CTA's warps and shared memory are dealt to the roles of an operation that moves rows.
struct CrewPlan {
  static constexpr int kMaxRoles = 3, kSpeakers = 2;  // a waiter and a poster for each role
  static constexpr int kSharedBytes = 216 * 1024;     // of a CTA, beside what is static

  int roles = 0;
  int movers[kMaxRoles] = {};
  int mover_warps[kMaxRoles] = {};  // of each: 1, or a feeder and its readers, which have a fed ring
  int stages[kMaxRoles] = {};       // of each mover's ring; 0: ordinary loads and stores
  int stage_bytes[kMaxRoles] = {};

  FLEXEP_HD constexpr int warps(int role) const { return kSpeakers + movers[role] * mover_warps[role]; }
  FLEXEP_HD constexpr int threads() const {
    int sum = 0;
    for (int role = 0; role < roles; ++role) sum += 32 * warps(role);
    return sum;
  }
  FLEXEP_HD constexpr RingLayout ring(int role) const { return {stages[role], stage_bytes[role]}; }
  FLEXEP_HD constexpr FedLayout<TermPiece> fed_ring(int role) const {
    return {stages[role], stage_bytes[role]};
  }
  /// Of each mover's ring.
  FLEXEP_HD constexpr std::size_t ring_bytes(int role) const {
    if (stages[role] == 0) return 0;
    return mover_warps[role] > 1 ? fed_ring(role).bytes : ring(role).bytes;
  }
  /// Where the rings of a role begin.
  FLEXEP_HD constexpr std::size_t rings_at(int role) const {
    std::size_t at = 0;
    for (int before = 0; before < role; ++before) at += movers[before] * ring_bytes(before);
    return at;
  }
  constexpr std::size_t shared_bytes() const { return rings_at(roles); }
};

/// A CTA's warps as a rank's crews in one slice. All threads call `run` of the warp that they belong to.
class CtaCrews {
 public:
  __device__ CtaCrews(const CrewPlan& plan, const WarpMem& mem, const WindowLayout& layout,
                      const Operation& operation, CrewCounts* counts, char* shared)
      : plan_(plan), mem_(mem), layout_(layout), operation_(operation), shared_(shared) {
    warp_ = static_cast<int>(threadIdx.x) / 32;
    while (warp_ >= plan_.warps(role_)) warp_ -= plan_.warps(role_++);
    counts_ = counts + role_;
  }

  __device__ const Topology& topology() const { return layout_.shape.topology; }
  __device__ int role() const { return role_; }
  __device__ bool moves() const { return warp_ >= CrewPlan::kSpeakers; }
  __device__ MoverWarp movers() const {
    return {(warp_ - CrewPlan::kSpeakers) / plan_.mover_warps[role_], plan_.movers[role_]};
  }
  /// This warp among those of its role in all of the rank's CTAs, which take turns.
  __device__ Lane among_all() const {
    const int slices = layout_.shape.slices;
    return {movers().rank() * slices + layout_.slice, movers().size() * slices};
  }

  /// Lets this warp's crew do what `work(crew, mover)` does, by ordinary loads and stores; returns what it moved.
  template <class Work>
  __device__ Moved by_lanes(const Work& work) {
    return as_actor([&](auto actor) {
      LaneMover mover(mem_);
      return play(actor, mover, work);
    });
  }
  /// The same through rings. The warps that do not move have none.
  template <class Use, class Work>
  __device__ Moved by_ring(std::int64_t row_bytes, Until until, const Use& use, const Work& work) {
    return as_actor([&](auto actor) {
      RingWarp<Use> mover(mem_, ring_of(actor), static_cast<int>(row_bytes), until, use);
      return play(actor, mover, work);
    });
  }
  /// The same by feeders, each with warps beside it that do read(reader, team) until it ends.
  template <class Note, class Read, class Work>
  __device__ Moved by_feeder(const Read& read, const Work& work) {
    if (moves() && !team().feeds()) {
      read(Reader<Note>(plan_.fed_ring(role_), ring_at(), team()), team());
      return {};
    }
    return as_actor([&](auto actor) {
      if constexpr (decltype(actor)() == Actor::mover) {
        FeedMover<Note> mover(mem_, Feeder<Note>(plan_.fed_ring(role_), ring_at(), team()));
        const Moved moved = play(actor, mover, work);
        mover.end();
        return moved;
      } else {
        LaneMover none(mem_);
        return play(actor, none, work);
      }
    });
  }

 private:
  /// This warp in its mover.
  __device__ FedTeam team() const {
    int barrier = 1 + movers().rank();  // all movers of the CTA differ; 0 is everybody's
    for (int role = 0; role < role_; ++role) barrier += plan_.movers[role];
    const int warps = plan_.mover_warps[role_];
    return {(warp_ - CrewPlan::kSpeakers) % warps, barrier, warps - 1};
  }
  __device__ std::size_t ring_at() const {
    return plan_.rings_at(role_) + movers().rank() * plan_.ring_bytes(role_);
  }
  template <class Who>
  __device__ Ring ring_of(Who actor) const {
    if (actor != Actor::mover) return {RingLayout(0, plan_.stage_bytes[role_]), shared_};
    return {plan_.ring(role_), shared_ + ring_at()};
  }
  /// Code of its own for each actor: those that wait and post are kept out of the registers of those that move.
  template <class Play>
  __device__ Moved as_actor(const Play& play) const {
    if (moves()) return play(ActorIs<Actor::mover>{});
    return warp_ == 0 ? play(ActorIs<Actor::waiter>{}) : play(ActorIs<Actor::poster>{});
  }
  template <class Who, class Mover, class Work>
  __device__ Moved play(Who actor, Mover& mover, const Work& work) const {
    WarpMem mem = mem_;
    OneWarp one;
    Exchange<WarpMem, OneWarp> exchange(mem, one, layout_, operation_);
    SplitCrew crew(actor, exchange, mover, movers(), *counts_);
    work(crew, mover);
    crew.finish();
    return mover.moved();
  }

  const CrewPlan& plan_;
  const WarpMem& mem_;
  const WindowLayout& layout_;
  const Operation& operation_;
  CrewCounts* counts_;
  char* shared_;
  int warp_, role_ = 0;
};

/// Dispatch and the backward of combine. Roles: place, offer, relay. Rows are offered by ordinary loads and stores: the
/// copy engine of the SM does one thing after the other, and is busy with those that are placed.
struct DeliverCrews {
  using Args = DeliverArgs;
  static constexpr bool kDelivers = true;
  static constexpr int kMaxThreads = 512;
  static constexpr int kPlace = 0, kOffer = 1;

  Zeros zeros;  // shared memory

  __device__ void begin() { zeros.clear(); }
  __device__ Moved run(CtaCrews& crews, const Args& args, int ranks) const {
    const std::int64_t row_bytes = args.hidden * size_of(args.dtype);
    const DevicePlace to(args, ranks);
    if (crews.role() == kPlace) return place(crews, args, to, row_bytes);
    if (crews.role() == kOffer) return offer(crews, args, to, zeros);
    return crews.by_ring(row_bytes, Until::stored, StoreEach{},
                         [&](auto& crew, auto&) { relay_rows(crew, args); });
  }

 private:
  __device__ __noinline__ static Moved offer(CtaCrews& crews, const Args& args, const DevicePlace& to,
                                             const Zeros& zeros) {
    return crews.by_lanes([&](auto& crew, auto&) {
      if (sends_ahead(crew.layout()))
        take_sent(crew, args);
      else
        offer_rows(crew, args);
      crew.finish();  // all is offered before anybody has time for the rows that nothing fills
      crew.only_move([&](auto&, const auto&) { to.pad(crews.among_all(), zeros); });
    });
  }
  __device__ __noinline__ static Moved place(CtaCrews& crews, const Args& args, const DevicePlace& to,
                                             std::int64_t row_bytes) {
    if (to.computes())
      return crews.by_ring(row_bytes, Until::read, ComputeEach(to), [&](auto& crew, auto& mover) {
        const ComputeRows rows{mover};
        place_rows(crew, args, rows);
      });
    return crews.by_ring(row_bytes, Until::read, StoreEach{}, [&](auto& crew, auto& mover) {
      CopyRows rows(to, mover);
      place_rows(crew, args, rows);
    });
  }
};

/// Combine and the backward of dispatch. Roles: push, add at home, relay. Expert rows, and partial sums at home, are
/// added by warps that a feeder brings them to. Sums are stored by ordinary stores.
struct CollectCrews {
  using Args = CollectArgs;
  static constexpr bool kDelivers = false;
  static constexpr int kMaxThreads = 640;
  static constexpr int kPush = 0, kHome = 1;

  __device__ void begin() const {}

  FLEXEP_HD static bool only_travels(const Args& args) { return args.flat && args.dtype == args.wire; }
  /// Whether what is added at home is rounded in between, for which warps that are fed have no registers.
  FLEXEP_HD static bool adds_groups(const Args& args) { return args.nest > 0; }

  __device__ Moved run(CtaCrews& crews, const Args& args, int) const {
    if (crews.role() == kPush && only_travels(args)) return push(crews, args);
    Moved moved;
    with_dtype(crews.role() == kPush ? args.dtype : args.wire, [&](auto dtype) {
      constexpr DType In = decltype(dtype)::value;
      moved = crews.role() == kPush   ? push_sums<In>(crews, args)
              : crews.role() != kHome ? relay<In>(crews, args)
              : adds_groups(args)     ? home_groups<In>(crews, args)
                                      : home<In>(crews, args);
    });
    return moved;
  }

 private:
  __device__ __noinline__ static Moved push(CtaCrews& crews, const Args& args) {
    const std::int64_t row_bytes = args.hidden * size_of(args.dtype);
    return crews.by_ring(row_bytes, Until::stored, StoreEach{}, [&](auto& crew, auto& mover) {
      const PushRows rows{static_cast<const char*>(args.y), row_bytes, mover};
      push_partials(crew, args, rows);
    });
  }
  template <DType In>
  __device__ __noinline__ static Moved push_sums(CtaCrews& crews, const Args& args) {
    return fed<In>(crews, args, args.part_weights != nullptr, args.wire,
                   [&](auto& crew, auto& rows) { push_partials(crew, args, rows); });
  }
  template <DType In>
  __device__ __noinline__ static Moved home(CtaCrews& crews, const Args& args) {
    const bool adds_own = own_sums(crews.topology(), args) == OwnSums::added_at_home;
    return fed<In>(crews, args, adds_own && args.part_weights != nullptr, args.out_dtype,
                   [&](auto& crew, auto& rows) { add_home(crew, args, rows); });
  }
  template <DType In>
  __device__ __noinline__ static Moved home_groups(CtaCrews& crews, const Args& args) {
    return crews.by_lanes([&](auto& crew, auto&) {
      using Adder = LaneAdder<In, true, 2, 2>;
      SumRows<In, Adder> rows(args, Adder(args.hidden, args.out_dtype));
      add_home(crew, args, rows);
    });
  }
  template <DType In>
  __device__ __noinline__ static Moved relay(CtaCrews& crews, const Args& args) {
    return crews.by_lanes([&](auto& crew, auto&) {
      using Adder = LaneAdder<In, false, 4, 2>;
      SumRows<In, Adder> rows(args, Adder(args.hidden, args.wire));
      relay_partials(crew, args, rows);
    });
  }

  /// role(crew, rows), whose sums are added by warps that are fed.
  template <DType In, class Role>
  __device__ __forceinline__ static Moved fed(CtaCrews& crews, const Args& args, bool weighted, DType out,
                                              const Role& role) {
    const auto read = [&](Reader<TermPiece> reader, const FedTeam& team) {
      if (team.readers == kWideReaders)
        weighted ? add_pieces<In, true, kWideReaders>(reader, team, out)
                 : add_pieces<In, false, kWideReaders>(reader, team, out);
      else
        weighted ? add_pieces<In, true, kNarrowReaders>(reader, team, out)
                 : add_pieces<In, false, kNarrowReaders>(reader, team, out);
    };
    return crews.by_feeder<TermPiece>(read, [&](auto& crew, auto& mover) {
      if constexpr (std::is_same_v<std::decay_t<decltype(mover)>, FeedMover<TermPiece>>) {
        FedRows<In> rows(args, mover, out);
        role(crew, rows);
      } else {
        NoRows rows;
        role(crew, rows);
      }
    });
  }
};

}  // namespace flexep
