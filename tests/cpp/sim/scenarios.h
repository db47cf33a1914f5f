// What every lane of every rank does in a world: the roles of csrc/kernels over the handshake, operation after
// operation, and what must have come of it. A template over Mem and Team: the simulator and threads run this text.
#pragma once
#include <cstring>
#include <string>
#include <vector>

#include "kernels/collect.h"
#include "kernels/deliver.h"
#include "kernels/records.h"
#include "mem/ring_mover.h"
#include "world.h"

namespace flexep::sim {

/// How a rank ended. Each team's leader writes its own status; the rest is written when all its lanes have met.
struct Ending {
  std::vector<Status> of_team;
  Status status = Status::arrived;
  int epochs = 0;     // operations that ended well
  bool over = false;  // false if the rank was killed
  FaultRecord fault;
};

/// What the lanes of a rank share.
struct RankState {
  std::vector<Epoch> last_used;
  std::vector<std::vector<std::int32_t>> ints;       // of each operation, the boards as they were read
  std::vector<std::vector<std::uint64_t>> received;  // and the records
  Ending ending;

  RankState(const World& world, int rank)
      : last_used(kChannels * world.topology().ranks * world.layout.shape.slices),
        ints(world.epochs),
        received(world.epochs) {
    ending.of_team.assign(world.teams(), Status::arrived);
    for (int epoch = 1; epoch <= world.epochs; ++epoch) {
      const Plan& plan = world.plan_of(epoch, rank);
      std::size_t records = 0;
      for (int n : plan.recv_splits) records += n;
      ints[epoch - 1].resize(plan.ints.size() * world.topology().ranks);
      received[epoch - 1].resize(records);
    }
  }
};

/// `Wrong` is told in words what came out wrong.
template <class Wrong>
struct PlaceCheck {
  const World& world;
  const Plan& plan;
  int epoch;
  const Wrong& wrong;

  void expect(int) const {}
  void place(int j, const void* row, const void*) const {
    piece(j, static_cast<const char*>(row), 0, kRowBytes);
  }
  void piece(int j, const char* bytes, int offset, int count) const {
    int source = 0;
    while (plan.arrival_base[source + 1] <= j) ++source;
    const Row want = world.row(epoch, source, plan.arrival_token[j], source);
    if (std::memcmp(bytes, reinterpret_cast<const char*>(want.data()) + offset, count) != 0)
      wrong("a pulled row differs");
  }
};

template <class Wrong>
struct AddCheck {
  const World& world;
  const Plan& plan;
  int epoch, me;
  const Wrong& wrong;
  mutable Row own{};

  void partial(int j, int, void* to) const {
    int home = 0;
    while (plan.arrival_base[home + 1] <= j) ++home;
    const Row row = world.row(epoch, home, plan.arrival_token[j], me);
    std::memcpy(to, row.data(), kRowBytes);
  }
  const void* own_sum(int j) const {
    partial(j, -1, own.data());
    return own.data();
  }
  void domain_sum(const void* const* terms, int count, void* to) const {
    const Row row = sum(terms, count);
    std::memcpy(to, row.data(), kRowBytes);
  }
  void home(int token, const void* const* terms, const int*, int count) const {
    if (sum(terms, count) != wanted(token)) wrong("a sum differs");
  }

 private:
  static Row sum(const void* const* terms, int count) {
    Row sum{};
    for (int i = 0; i < count; ++i) {
      Row term;
      std::memcpy(term.data(), terms[i], kRowBytes);
      World::fold(sum, term);
    }
    return sum;
  }
  Row wanted(int token) const {
    const Topology& topology = world.topology();
    Row all{};
    for (int domain = 0; domain < topology.domains(); ++domain) {
      Row of_domain{};
      for (int i = 0; i < topology.domain_size; ++i) {
        const int from = topology.rank_of(domain, i);
        if (!world.goes(epoch, me, token, from)) continue;
        const Row term = world.row(epoch, me, token, from);
        World::fold(topology.domains() > 1 ? of_domain : all, term);
      }
      if (topology.domains() > 1 && world.goes_into(epoch, me, token, domain)) World::fold(all, of_domain);
    }
    return all;
  }
};

/// Who is who among the lanes of a SplitCrew: lane 0 waits, lane 1 posts, the others move.
inline Actor actor_of(int lane) {
  return lane == 0 ? Actor::waiter : lane == 1 ? Actor::poster : Actor::mover;
}
inline Lane mover_lane(int lane, int lanes) { return {lane - 2, lanes - 2}; }

/// What a ring does with rows that arrive: each piece is looked at in its stage.
template <class Check>
struct CheckEach {
  using Place = int;
  template <int N>
  using Places = Uniform<Place, N>;
  const Check& check;
  template <class Ring>
  void operator()(Ring& ring, const char* stage, int j, int offset, int bytes) const {
    check.piece(j, stage, offset, bytes);
    ring.skip();
  }
};
template <class Mover>
struct MoveRows {
  Mover& mover;
  void expect(int) const {}
  void place(int j, const void* row, const void*) const { mover.move(row, j); }
};

/// One lane's part of one operation. Role 0 receives, 1 sends, 2 relays. `with_crew(exchange, use)` lets the lane's
/// crew do what `use(crew)` does; `sends(exchange, use)` may do so through rings, and `places(exchange, check, use)`
/// too, with the rows of `use(crew, rows)`.
template <class Mem, class Team, class WithCrew, class Wrong>
class Roles {
 public:
  Roles(const World& world, int epoch, Exchange<Mem, Team>& exchange, WithCrew& with_crew, RankState& state,
        const Wrong& wrong)
      : world_(world),
        epoch_(epoch),
        exchange_(exchange),
        with_crew_(with_crew),
        state_(state),
        wrong_(wrong) {}

  Status play(int role, int page) {
    switch (world_.kind(epoch_)) {
      case Kind::publish:
        return role == 0 && exchange_.layout().slice == 0 ? publish_board(page) : Status::arrived;
      case Kind::records:
        return records(role);
      case Kind::deliver:
        return deliver(role);
      default:
        return with_crew_(exchange_, [&](auto& crew) { return collect(crew, role); });
    }
  }

  /// After all lanes of the rank have met: what came in by copies.
  void check() const {
    const int me = exchange_.rank(), count = static_cast<int>(plan().ints.size());
    std::size_t at = 0;
    if (world_.kind(epoch_) == Kind::publish) {
      for (int r = 0; r < world_.topology().ranks; ++r)
        for (int i = 0; i < count; ++i)
          if (state_.ints[epoch_ - 1][at++] != world_.integer(epoch_, r, i)) wrong_("a board differs");
    }
    if (world_.kind(epoch_) == Kind::records) {
      for (int r = 0; r < world_.topology().ranks; ++r)
        for (int i = 0; i < plan().recv_splits[r]; ++i)
          if (state_.received[epoch_ - 1][at++] != world_.record(epoch_, r, me, i))
            wrong_("a record differs");
    }
  }

 private:
  const Plan& plan() const { return world_.plan_of(epoch_, exchange_.rank()); }

  Status publish_board(int page) {
    const PublishArgs args{plan().ints.data(), static_cast<int>(plan().ints.size()),
                           state_.ints[epoch_ - 1].data()};
    return publish_ints(exchange_, page, args, std::memcpy);
  }
  Status records(int role) {
    const RecordArgs args{plan().records.data(), plan().send_splits.data(),
                          state_.received[epoch_ - 1].data(), plan().recv_splits.data(), kRecordBytes};
    if (role == 0) return take_records(exchange_, args, std::memcpy);
    return role == 1 ? send_records(exchange_, args) : Status::arrived;
  }
  Arrivals arrivals() const {
    return {plan().arrival_token.data(), plan().arrival_base.data(), nullptr, world_.topology().ranks};
  }
  Relayed relayed() const {
    return {plan().relay_token.data(), plan().relay_base.data(), plan().members.data()};
  }
  Status deliver(int role) {
    DeliverArgs args{};
    args.tokens_of = plan().tokens_of.data(), args.x = plan().x.data();
    args.arrivals = arrivals(), args.relayed = relayed();
    args.dtype = DType::u8, args.hidden = kRowBytes;
    args.registered = plan().registered.data();
    if (world_.knows_readers(epoch_)) args.read_by = plan().home_rank.data();
    const PlaceCheck<Wrong> place{world_, plan(), epoch_, wrong_};
    if (role == 0)
      return with_crew_.places(exchange_, place,
                               [&](auto& crew, auto& rows) { return place_rows(crew, args, rows); });
    return with_crew_.sends(exchange_, [&](auto& crew) {
      if (role != 1) return relay_rows(crew, args);
      if (!sends_ahead(exchange_.layout())) return offer(crew, args);
      if (!world_.sent_before(epoch_, exchange_.rank())) return send_ahead(crew, args);
      const Status status = crew.only_wait([&](auto& exchange) { return send_before(exchange, args); });
      if (status == Status::arrived) take_sent(crew, args);
      return status;
    });
  }
  /// What somebody beside the crew does before the operation, as a GPU's copy engines do (device_ahead.h): sends the
  /// rows once all lines are idle, and says so chunk after chunk. Nobody has written down yet that the lines are in
  /// use.
  template <class Beside>
  Status send_before(Beside& exchange, const DeliverArgs& args) {
    const WindowLayout& layout = exchange.layout();
    const Cut cut = pull_cut(layout);
    const int me = exchange.rank(), R = world_.topology().ranks, T = args.tokens_of[me];
    const auto line = [&](int step) { return Topology::direct(me, (me + step) % R); };
    for (int step = 1; step < R; ++step) {
      const Status status = exchange.emptied_before(Channel::pull, line(step));
      if (status != Status::arrived) return status;
    }
    for (int chunk = 0; chunk < cut.chunks(T); ++chunk) {
      const Range mine = share(exchange.team(), cut.range(chunk, T));
      for (int step = 1; step < R; ++step)
        for (int token = mine.begin; token < mine.end; ++token) {
          const int to = line(step).peer;
          exchange.mem().put(to, layout.landed_row(to, me, token), plan().x[token].data(), kRowBytes);
        }
      exchange.settle();
      for (int step = 1; step < R; ++step) exchange.announce(Channel::pull, line(step), chunk);
    }
    return Status::arrived;
  }
  /// Rows that live in the window are written there before the operation, and are the caller's again after it.
  template <class Crew>
  Status offer(Crew& crew, const DeliverArgs& args) {
    static constexpr Row kOther{~0u, ~0u, ~0u, ~0u, ~0u};
    const int me = exchange_.rank(), rows = args.registered[me] ? args.tokens_of[me] : 0;
    const WindowLayout& layout = crew.layout();
    const Cut cut = pull_cut(layout);  // each slice's own rows
    const auto write = [&](auto& mem, const auto& lanes, const auto& row_of) {
      for (int chunk = 0; chunk < cut.chunks(rows); ++chunk) {
        const Range mine = share(lanes, cut.range(chunk, rows));
        for (int token = mine.begin; token < mine.end; ++token)
          mem.put(me, layout.registered_row(token), row_of(token), kRowBytes);
      }
    };
    crew.only_move([&](auto& mem, const auto& lanes) {
      write(mem, lanes, [&](int token) { return plan().x[token].data(); });
    });
    const Status status = offer_rows(crew, args);
    if (status != Status::arrived) return status;
    return crew.only_wait([&](auto& exchange) {
      write(exchange.mem(), exchange.team(), [](int) { return kOther.data(); });
      exchange.settle();
      return Status::arrived;
    });
  }
  template <class Crew>
  Status collect(Crew& crew, int role) {
    CollectArgs args{};
    args.tokens_of = plan().tokens_of.data(), args.home_rank = plan().home_rank.data();
    args.arrivals = arrivals(), args.relayed = relayed();
    args.dtype = args.wire = args.out_dtype = DType::u8, args.hidden = kRowBytes;
    args.flat = world_.is_flat(epoch_), args.y = plan().y.data();
    const AddCheck<Wrong> add{world_, plan(), epoch_, exchange_.rank(), wrong_};
    if (role == 0) return add_home(crew, args, add);
    return role == 1 ? push_partials(crew, args, add) : relay_partials(crew, args, add);
  }

  const World& world_;
  int epoch_;
  Exchange<Mem, Team>& exchange_;
  WithCrew& with_crew_;
  RankState& state_;
  const Wrong& wrong_;
};

/// All operations of one lane. `meet()` joins all lanes of the rank.
template <class Mem, class Team, class WithCrew, class Meet, class Wrong>
void run_lane(const World& world, int rank, int team_number, Mem& mem, Team& team, WithCrew& with_crew,
              const Meet& meet, RankState& state, const Wrong& wrong) {
  Ending& ending = state.ending;
  const int slice = team_number / world.roles(), channels = kChannels * world.topology().ranks;
  const WindowLayout layout = world.layout.of_slice(slice);
  const bool first = team_number == 0 && team.rank() == 0;
  int boards = 0;
  for (int epoch = 1; epoch <= world.last_epoch(rank); ++epoch) {
    const Operation operation{rank, static_cast<Epoch>(epoch), world.op(epoch, rank),
                              state.last_used.data() + slice * channels, world.seconds(rank)};
    Exchange<Mem, Team> exchange(mem, team, layout, operation);
    Roles<Mem, Team, WithCrew, Wrong> roles(world, epoch, exchange, with_crew, state, wrong);
    const int page = boards % 2;
    if (world.kind(epoch) == Kind::publish) ++boards;
    const Status status = roles.play(team_number % world.roles(), page);
    if (team.rank() == 0) ending.of_team[team_number] = status;
    meet();
    if (first) {
      for (Status of_team : ending.of_team)
        if (of_team != Status::arrived) ending.status = of_team;
      if (ending.status == Status::arrived) roles.check(), ++ending.epochs;
    }
    meet();
    if (ending.status != Status::arrived) break;
  }
  if (!first) return;
  if (ending.status != Status::arrived)
    std::memcpy(&ending.fault, mem.view(rank, world.layout.faults.of(rank), sizeof(FaultRecord)),
                sizeof(FaultRecord));
  if (world.leaves(rank) && mem.stop_once())
    for (int to = 0; to < world.topology().ranks; ++to)
      mem.post(to, world.layout.word(Word::stopped, rank), kLeft);
  ending.over = true;
}

}  // namespace flexep::sim
