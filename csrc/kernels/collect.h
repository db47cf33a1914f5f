// The roles that bring partial sums home: rows are pushed, one for each token and rank that holds a slot of it.
//
// With one domain every rank pushes into the home's window, which adds what comes by ascending rank. Over domains the
// relay on the home's rail adds its own domain's partial sums first, rounds, and pushes one row over the rail.
// Every chunk is announced by everybody, empty or not: the reader then knows that nothing is missing. A rank's own rows
// need not pass its window (`OwnSums`).
//
// `Row` says how rows are added: partial(j, next, to), domain_sum(terms, count, to), home(token, terms, rings, count).
// They write where `Mem::target(rank, at, bytes)` says: memory in which the lane may put those bytes until its drain. And
// own_sum(j): a partial sum that no window needs, where it can be read until the next one.
#pragma once
#include "kernels/args.h"
#include "kernels/chunks.h"
#include "proto/relay.h"

namespace flexep {

constexpr int kMaxTopK = 32;

/// The rank whose push ring a partial sum for `home` goes into, and the words of that line.
struct PushTo {
  Channel channel;
  Line line;
  int owner;
  int ring;  // index of the line's ring there
};

FLEXEP_HD PushTo push_to(const Topology& topology, int me, int home) {
  if (topology.domains() == 1) return {Channel::push, Topology::direct(me, home), home, me};
  const Line line = topology.to_relay(home, me);
  return {Channel::relay_push, line, line.peer, line.there};
}

/// How home gets its own rank's partial sums: out of the window like others', or out of y, where each is a row as it would
/// travel, or is added there, before what others send. That is its place in the order of ranks if those are two: which of
/// two summands comes first changes no bit.
enum class OwnSums { pushed, are_rows, added_at_home };

FLEXEP_HD OwnSums own_sums(const Topology& topology, const CollectArgs& args) {
  if (topology.domains() > 1 || args.nest > 0 || args.dtype != args.wire) return OwnSums::pushed;
  if (args.flat || (args.arrivals.top_k == 1 && args.part_weights == nullptr)) return OwnSums::are_rows;
  return topology.ranks <= 2 ? OwnSums::added_at_home : OwnSums::pushed;
}
/// The received row of the first of my own tokens from `token` on.
template <class Lanes>
FLEXEP_HD int first_own(const Lanes& lanes, const CollectArgs& args, int me, int token) {
  const Arrivals& list = args.arrivals;
  const Range own{list.base[me], list.base[me + 1]};
  return first_from(lanes, list.token, can_begin(own, args.tokens_of[me], token), token);
}

FLEXEP_HD const void* own_row(const CollectArgs& args, int received) {
  const std::int64_t row = args.flat ? received : args.arrivals.rows[received];
  return static_cast<const char*>(args.y) + row * args.hidden * size_of(args.dtype);
}

/// Adds the rows of received rows and puts each sum where at(token) says in the window of `owner`. These two are
/// overloaded for lanes that work together.
template <class Lanes, class Row, class Mem, class At>
FLEXEP_HD void add_received(const Lanes& lanes, Row& row, Mem& mem, Range mine, const std::int32_t* token,
                            int owner, const At& at, std::size_t row_bytes) {
  auto tokens = ints(lanes, token, mine);
  for (int j = mine.begin; j < mine.end; ++j)
    row.partial(j, j + 1 < mine.end ? j + 1 : -1, mem.target(owner, at(tokens[j]), row_bytes));
}

/// Expert side: reduces my rows of each chunk to one partial sum a token and pushes it towards the token's home.
template <class Crew, class Row>
FLEXEP_HD Status push_partials(Crew& crew, const CollectArgs& args, Row& row) {
  const WindowLayout& layout = crew.layout();
  const Cut cut = push_cut(layout);
  const int R = layout.shape.topology.ranks, me = crew.rank();
  const auto row_bytes = static_cast<std::size_t>(args.hidden * size_of(args.wire));
  const Arrivals& list = args.arrivals;
  const OwnSums own = own_sums(layout.shape.topology, args);
  for (int chunk = 0, most = most_chunks(args.tokens_of, R, cut); chunk < most; ++chunk) {
    for (int step = 0; step < R; ++step) {
      const int home = (me + 1 + step) % R;  // my own last: others wait longer for what travels
      if (chunk >= cut.chunks(args.tokens_of[home]) || (home == me && own != OwnSums::pushed)) continue;
      const PushTo to = push_to(layout.shape.topology, me, home);
      const Status status = crew.step(
          [&](auto& exchange) { return exchange.claim(to.channel, to.line, chunk); },
          [&](auto& mem, const auto& lanes) {
            const Range all = in_chunk(lanes, list.token, {list.base[home], list.base[home + 1]}, cut, chunk);
            const Range mine = share(turned(lanes, chunk + step), all);
            const std::int64_t first = cut.first(chunk);
            const std::size_t first_at = to.channel == Channel::push
                                             ? layout.push_row(to.ring, chunk, 0)
                                             : layout.relay_push_row(to.ring, chunk, 0);
            const std::size_t stride = layout.shape.push_row_bytes;
            add_received(
                lanes, row, mem, mine, list.token, to.owner,
                [&](int token) { return first_at + (token - first) * stride; }, row_bytes);
          },
          [&](auto& exchange) { exchange.announce(to.channel, to.line, chunk); });
      if (status != Status::arrived) return status;
    }
  }
  return Status::arrived;
}

/// Relay: adds the partial sums of my domain for the sources on my rail, my own rank among them, rounds, and pushes one
/// row a token home.
template <class Crew, class Row>
FLEXEP_HD Status relay_partials(Crew& crew, const CollectArgs& args, Row& row) {
  const WindowLayout& layout = crew.layout();
  const Topology& topology = layout.shape.topology;
  const Cut cut = push_cut(layout);
  const int me = crew.rank(), S = topology.domain_size;
  const auto row_bytes = static_cast<std::size_t>(args.hidden * size_of(args.wire));
  const Relayed& list = args.relayed;
  const int top_k = args.arrivals.top_k;
  for (int chunk = 0, most = most_chunks(args.tokens_of, topology.ranks, cut); chunk < most; ++chunk) {
    for (int step = 0; step < topology.domains(); ++step) {
      const int domain = (topology.domain(me) + step) % topology.domains();
      const int home = topology.rank_of(domain, topology.index(me)),
                chunks = cut.chunks(args.tokens_of[home]);
      if (chunk >= chunks) continue;
      const auto add_domain = [&](auto& mem, const auto& lanes) {
        const Range all = in_chunk(lanes, list.token, {list.base[domain], list.base[domain + 1]}, cut, chunk);
        const Range mine = share(turned(lanes, chunk + step), all);
        auto tokens = ints(lanes, list.token, mine);
        auto members = of_tokens(lanes, list.members, mine, top_k);
        for (int q = mine.begin; q < mine.end; ++q) {
          const auto in_slot = static_cast<int>(tokens[q] - cut.first(chunk));
          const void* terms[kMaxTopK];
          int count = 0;
          for (int k = 0; k < top_k; ++k) {
            const int index = members[(q - mine.begin) * top_k + k];
            if (index >= 0)
              terms[count++] =
                  mem.view(me, layout.relay_push_row(domain * S + index, chunk, in_slot), row_bytes);
          }
          row.domain_sum(terms, count,
                         mem.target(home, layout.push_row(topology.domain(me), chunk, in_slot), row_bytes));
        }
      };
      const auto in = [&](int index) {
        return topology.from_relay(home, topology.rank_of(topology.domain(me), index));
      };
      const auto out = [&](int) { return Topology::direct(me, home); };
      const Status status = relay_chunk(crew, Channel::relay_push, S, in, Channel::push, 1, out, chunk,
                                        chunk + 1 == chunks, add_domain);
      if (status != Status::arrived) return status;
    }
  }
  return Status::arrived;
}

/// Adds the terms of tokens at home, one for each ring that ring_of(rank) of their ranks names: at(token, ring) says
/// where one lies in my window. Those of my own rank are had as `own` says.
template <class Lanes, class Row, class Mem, class RingOf, class At>
FLEXEP_HD void add_tokens(const Lanes& lanes, Row& row, Mem& mem, int me, Range mine, const CollectArgs& args,
                          OwnSums own, const RingOf& ring_of, const At& at, std::size_t row_bytes) {
  const int top_k = args.arrivals.top_k;
  const bool stay = own != OwnSums::pushed;
  int received = stay && mine.begin < mine.end ? first_own(lanes, args, me, mine.begin) : 0;
  for (int token = mine.begin; token < mine.end; ++token) {
    const void* terms[kMaxTopK];
    int rings[kMaxTopK], count = 0;
    for (int k = 0; k < top_k; ++k) {
      const int rank = args.home_rank[static_cast<long long>(token) * top_k + k];
      if (rank < 0) break;
      const int ring = ring_of(rank);
      if (count > 0 && rings[count - 1] == ring) continue;  // its domain has added it already
      rings[count] = ring;
      if (!stay || rank != me)
        terms[count++] = mem.view(me, at(token, ring), row_bytes);
      else
        terms[count++] = own == OwnSums::are_rows ? own_row(args, received++) : row.own_sum(received++);
    }
    row.home(token, terms, rings, count);
  }
}

/// Home: once a chunk has come from everybody who pushes to me, adds each token's terms in ascending order.
template <class Crew, class Row>
FLEXEP_HD Status add_home(Crew& crew, const CollectArgs& args, Row& row) {
  const WindowLayout& layout = crew.layout();
  const Topology& topology = layout.shape.topology;
  const Cut cut = push_cut(layout);
  const int me = crew.rank(), T = args.tokens_of[me];
  const bool flat = topology.domains() == 1;
  const OwnSums own = own_sums(topology, args);
  const int writers = flat ? topology.ranks : topology.domains();
  const auto comes_from = [&](int writer) { return own == OwnSums::pushed || writer != me; };
  const auto row_bytes = static_cast<std::size_t>(args.hidden * size_of(args.wire));
  const auto line = [&](int writer) {
    return Topology::direct(me, flat ? writer : topology.rank_of(writer, topology.index(me)));
  };
  for (int chunk = 0, chunks = cut.chunks(T); chunk < chunks; ++chunk) {
    const Status status = crew.step(
        [&](auto& exchange) {
          for (int writer = 0; writer < writers; ++writer) {
            if (!comes_from(writer)) continue;
            const Status status = exchange.arrive(Channel::push, line(writer), chunk);
            if (status != Status::arrived) return status;
          }
          return Status::arrived;
        },
        [&](auto& mem, const auto& lanes) {
          const Range mine = share(turned(lanes, chunk), cut.range(chunk, T));
          const std::int64_t first = cut.first(chunk);
          const std::size_t first_at = layout.push_row(0, chunk, 0), stride = layout.shape.push_row_bytes;
          const std::size_t ring_bytes = layout.push_row(1, chunk, 0) - first_at;
          const auto ring_of = [&](int rank) { return flat ? rank : topology.domain(rank); };
          add_tokens(
              lanes, row, mem, me, mine, args, own, ring_of,
              [&](int token, int ring) { return first_at + ring * ring_bytes + (token - first) * stride; },
              row_bytes);
        },
        [&](auto& exchange) {
          for (int writer = 0; writer < writers; ++writer)
            if (comes_from(writer)) exchange.release(Channel::push, line(writer), chunk, chunk + 1 == chunks);
        });
    if (status != Status::arrived) return status;
  }
  return Status::arrived;
}

}  // namespace flexep
