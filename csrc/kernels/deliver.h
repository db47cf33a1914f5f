// The roles that bring tokens to the ranks of their experts: rows are pulled, once by each rank that needs them.
//
// Every source offers chunk after chunk of its rows in its own window; the ranks of its domain read them there. For
// other domains the relay on its rail reads a row once and offers it again inside its domain.
//
// `Row` (host_rows.h, or a kernel's) says what is done with a row: place(j, row, next) at received row j, pad().
#pragma once
#include "kernels/args.h"
#include "kernels/chunks.h"
#include "proto/exchange.h"
#include "proto/relay.h"

namespace flexep {

/// Source: puts my chunks into my window and offers each to the ranks of my domain and to the relays on my rail.
template <class Mem, class Team>
FLEXEP_HD Status offer_rows(Exchange<Mem, Team>& exchange, const DeliverArgs& args) {
  const Topology& topology = exchange.topology();
  const WindowShape& shape = exchange.layout().shape;
  const int me = exchange.rank(), C = shape.pull_tokens, T = args.tokens_of[me];
  const auto row_bytes = static_cast<std::size_t>(args.hidden * size_of(args.dtype));
  const auto reads = [&](int peer) {
    return peer != me &&
           (topology.domain(peer) == topology.domain(me) || topology.index(peer) == topology.index(me));
  };
  for (int chunk = 0; chunk < ceil_div(T, C); ++chunk) {
    for (int peer = 0; peer < topology.ranks; ++peer) {
      if (!reads(peer)) continue;
      const Status status = exchange.claim(Channel::pull, Topology::direct(me, peer), chunk);
      if (status != Status::arrived) return status;
    }
    if (!args.registered[me]) {
      const int first = chunk * C, end = T < first + C ? T : first + C;
      const Range mine = share(exchange.team(), {first, end});
      for (int t = mine.begin; t < mine.end; ++t)
        exchange.mem().put(me, exchange.layout().pull_row(chunk, t - first),
                           static_cast<const char*>(args.x) + t * row_bytes, row_bytes);
    }
    exchange.settle();
    for (int peer = 0; peer < topology.ranks; ++peer)
      if (reads(peer)) exchange.announce(Channel::pull, Topology::direct(me, peer), chunk);
  }
  if (!args.registered[me] || T == 0) return Status::arrived;
  for (int peer = 0; peer < topology.ranks; ++peer) {  // x is the caller's again once everybody has read it
    if (!reads(peer)) continue;
    const Status status = exchange.emptied(Channel::pull, Topology::direct(me, peer));
    if (status != Status::arrived) return status;
  }
  return Status::arrived;
}

/// Where a source's chunk can be read by this rank, and through which words it is handed over.
struct PullFrom {
  Channel channel;
  Line line;
  int owner;         // whose window
  int relay_domain;  // of the source, if the owner is a relay; else -1
};

FLEXEP_HD PullFrom pull_from(const Topology& topology, int me, int source) {
  if (topology.domain(source) == topology.domain(me))
    return {Channel::pull, Topology::direct(me, source), source, -1};
  return {Channel::relay_pull, topology.to_relay(source, me), topology.relay(source, me),
          topology.domain(source)};
}

/// Destination: takes every row of mine out of each chunk, once, and places its copies.
template <class Mem, class Team, class Row>
FLEXEP_HD Status place_rows(Exchange<Mem, Team>& exchange, const DeliverArgs& args, Row& row) {
  const WindowLayout& layout = exchange.layout();
  const int R = layout.shape.topology.ranks, me = exchange.rank(), C = layout.shape.pull_tokens;
  const auto row_bytes = static_cast<std::size_t>(args.hidden * size_of(args.dtype));
  const Arrivals& list = args.arrivals;
  row.pad(exchange.team());
  for (int chunk = 0, most = most_chunks(args.tokens_of, R, C); chunk < most; ++chunk) {
    for (int step = 0; step < R; ++step) {
      const int source = (me + step) % R, chunks = ceil_div(args.tokens_of[source], C);
      if (chunk >= chunks) continue;
      const PullFrom from = pull_from(layout.shape.topology, me, source);
      if (source != me) {
        const Status status = exchange.arrive(from.channel, from.line, chunk);
        if (status != Status::arrived) return status;
      }
      const auto at = [&](int j) -> const void* {
        const int token = list.token[j];
        if (source == me) return static_cast<const char*>(args.x) + token * row_bytes;
        std::size_t place = args.registered[source] && from.relay_domain < 0
                                ? layout.registered_row(token)
                                : layout.pull_row(chunk, token - chunk * C);
        if (from.relay_domain >= 0)
          place = layout.relay_pull_row(from.relay_domain, chunk, token - chunk * C);
        return exchange.mem().view(from.owner, place, row_bytes);
      };
      const Range all = in_chunk(list.token, {list.base[source], list.base[source + 1]}, chunk, C);
      const Range mine = share(exchange.team(), all);
      const void* next = mine.begin < mine.end ? at(mine.begin) : nullptr;
      for (int j = mine.begin; j < mine.end; ++j) {
        const void* const now = next;
        next = j + 1 < mine.end ? at(j + 1) : nullptr;
        row.place(j, now, next);
      }
      if (source != me) exchange.release(from.channel, from.line, chunk, chunk + 1 == chunks);
    }
  }
  return Status::arrived;
}

/// Relay: pulls each row that my domain needs from the sources on my rail, once, and offers it inside the domain.
template <class Mem, class Team>
FLEXEP_HD Status relay_rows(Exchange<Mem, Team>& exchange, const DeliverArgs& args) {
  const WindowLayout& layout = exchange.layout();
  const Topology& topology = layout.shape.topology;
  const int me = exchange.rank(), C = layout.shape.pull_tokens;
  const auto row_bytes = static_cast<std::size_t>(args.hidden * size_of(args.dtype));
  const Relayed& list = args.relayed;
  for (int chunk = 0, most = most_chunks(args.tokens_of, topology.ranks, C); chunk < most; ++chunk) {
    for (int step = 1; step < topology.domains(); ++step) {
      const int domain = (topology.domain(me) + step) % topology.domains();
      const int source = topology.rank_of(domain, topology.index(me)),
                chunks = ceil_div(args.tokens_of[source], C);
      if (chunk >= chunks) continue;
      const auto forward = [&] {
        const Range all = in_chunk(list.token, {list.base[domain], list.base[domain + 1]}, chunk, C);
        const Range mine = share(exchange.team(), all);
        for (int q = mine.begin; q < mine.end; ++q) {
          const int token = list.token[q];
          const std::size_t from = args.registered[source] ? layout.registered_row(token)
                                                           : layout.pull_row(chunk, token - chunk * C);
          exchange.mem().put(me, layout.relay_pull_row(domain, chunk, token - chunk * C),
                             exchange.mem().view(source, from, row_bytes), row_bytes);
        }
      };
      const auto in = [&](int) { return Topology::direct(me, source); };
      const auto out = [&](int index) {
        return topology.from_relay(source, topology.rank_of(topology.domain(me), index));
      };
      const Status status = relay_chunk(exchange, Channel::pull, 1, in, Channel::relay_pull,
                                        topology.domain_size, out, chunk, chunk + 1 == chunks, forward);
      if (status != Status::arrived) return status;
    }
  }
  return Status::arrived;
}

}  // namespace flexep
