// The roles that bring tokens to the ranks of their experts: rows are pulled, once by each rank that needs them.
//
// Every source offers chunk after chunk of its rows in its own window; the ranks of its domain read them there. For
// other domains the relay on its rail reads a row once and offers it again inside its domain.
//
// Or every source sends all of its rows ahead to all peers (WindowShape::landed_rows), before anybody knows who needs
// which; destinations then read their own windows. The words are those of a pull.
//
// `Row` (host_rows.h, or a kernel's) says what is done with a row: place(j, row, next) at received row j. expect(j)
// comes before the first of a few rows: what that one needs can be under way. Rows of `out` that no row comes to are the
// caller's to clear.
#pragma once
#include "kernels/args.h"
#include "kernels/chunks.h"
#include "proto/relay.h"

namespace flexep {

/// Whether rows are sent ahead.
FLEXEP_HD bool sends_ahead(const WindowLayout& layout) { return layout.shape.landed_rows > 0; }

/// Source: sends my chunks of a slice to every peer at once. On a GPU the copy engines do this for all slices
/// (device_ahead.h).
template <class Crew>
FLEXEP_HD Status send_ahead(Crew& crew, const DeliverArgs& args) {
  const WindowLayout& layout = crew.layout();
  const Cut cut = pull_cut(layout);
  const int me = crew.rank(), R = layout.shape.topology.ranks, T = args.tokens_of[me];
  const int chunks = cut.chunks(T);
  if (chunks == 0) return Status::arrived;
  return crew.step(
      [&](auto& exchange) {
        for (int step = 1; step < R; ++step) {
          const Status status = exchange.claim(Channel::pull, Topology::direct(me, (me + step) % R), 0);
          if (status != Status::arrived) return status;
        }
        return Status::arrived;
      },
      [&](auto& mem, const auto& lanes) {
        const auto row_bytes = static_cast<std::size_t>(layout.shape.pull_row_bytes);
        const char* const x = static_cast<const char*>(args.x);
        for (int chunk = 0; chunk < chunks; ++chunk) {
          const Range mine = share(turned(lanes, chunk), cut.range(chunk, T));
          for (int t = mine.begin; t < mine.end; ++t)
            for (int step = 1; step < R; ++step) {
              const int to = (me + step) % R;
              mem.put(to, layout.landed_row(to, me, t), x + t * row_bytes, row_bytes);
            }
        }
      },
      [&](auto& exchange) {
        for (int step = 1; step < R; ++step)
          exchange.announce(Channel::pull, Topology::direct(me, (me + step) % R), chunks - 1);
      });
}

/// Source whose rows of a slice have been sent ahead outside of this operation: writes down that they were.
template <class Crew>
FLEXEP_HD void take_sent(Crew& crew, const DeliverArgs& args) {
  const WindowLayout& layout = crew.layout();
  const int me = crew.rank(), R = layout.shape.topology.ranks;
  if (pull_cut(layout).chunks(args.tokens_of[me]) == 0) return;
  (void)crew.only_wait([&](auto& exchange) {
    for (int step = 1; step < R; ++step) exchange.take(Channel::pull, Topology::direct(me, (me + step) % R));
    return Status::arrived;
  });
}

/// Source: puts my chunks into my window and offers each to the ranks of my domain and to the relays on my rail. Where
/// it is known who reads a row (of one domain), one that nobody else reads is left out of its chunk.
template <class Crew>
FLEXEP_HD Status offer_rows(Crew& crew, const DeliverArgs& args) {
  const WindowLayout& layout = crew.layout();
  const Topology& topology = layout.shape.topology;
  const Cut cut = pull_cut(layout);
  const int me = crew.rank(), T = args.tokens_of[me], top_k = args.arrivals.top_k;
  const int chunks = topology.ranks > 1 ? cut.chunks(T) : 0;  // alone, nobody reads them
  const auto row_bytes = static_cast<std::size_t>(args.hidden * size_of(args.dtype));
  const auto reads = [&](int peer) {
    return peer != me &&
           (topology.domain(peer) == topology.domain(me) || topology.index(peer) == topology.index(me));
  };
  const auto each_reader = [&](const auto& await) {
    for (int peer = 0; peer < topology.ranks; ++peer) {
      if (!reads(peer)) continue;
      const Status status = await(Topology::direct(me, peer));
      if (status != Status::arrived) return status;
    }
    return Status::arrived;
  };
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const Status status = crew.step(
        [&](auto& exchange) {
          return each_reader([&](const Line& line) { return exchange.claim(Channel::pull, line, chunk); });
        },
        [&](auto& mem, const auto& lanes) {
          if (args.registered[me]) return;
          const Range mine = share(turned(lanes, chunk), cut.range(chunk, T));
          const char* const x = static_cast<const char*>(args.x);
          const std::int64_t first = cut.first(chunk);
          const std::size_t at = layout.pull_row(chunk, 0), stride = layout.shape.pull_row_bytes;
          const auto put = [&](int t) {
            mem.put(me, at + (t - first) * stride, x + t * row_bytes, row_bytes);
          };
          if (args.read_by == nullptr) {
            for (int t = mine.begin; t < mine.end; ++t) put(t);
            return;
          }
          auto readers = of_tokens(lanes, args.read_by, mine, top_k);
          for (int t = mine.begin; t < mine.end; ++t) {
            const int list = (t - mine.begin) * top_k, reader = readers[list];
            if (reader >= 0 && (reader != me || (top_k > 1 && readers[list + 1] >= 0))) put(t);
          }
        },
        [&](auto& exchange) {
          for (int peer = 0; peer < topology.ranks; ++peer)
            if (reads(peer)) exchange.announce(Channel::pull, Topology::direct(me, peer), chunk);
        });
    if (status != Status::arrived) return status;
  }
  if (!args.registered[me] || chunks == 0) return Status::arrived;
  return crew.only_wait([&](auto& exchange) {  // x is the caller's again once everybody has read it
    return each_reader([&](const Line& line) { return exchange.emptied(Channel::pull, line); });
  });
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
template <class Crew, class Row>
FLEXEP_HD Status place_rows(Crew& crew, const DeliverArgs& args, Row& row) {
  const WindowLayout& layout = crew.layout();
  const Cut cut = pull_cut(layout);
  const int R = layout.shape.topology.ranks, me = crew.rank();
  const auto row_bytes = static_cast<std::size_t>(args.hidden * size_of(args.dtype));
  const Arrivals& list = args.arrivals;
  ChunkRows<typename Crew::MoveLanes> rows_of(list, args.tokens_of, cut, R, me);
  crew.only_move([&](auto&, const auto& lanes) { rows_of.prepare(lanes); });
  for (int chunk = 0, most = most_chunks(args.tokens_of, R, cut); chunk < most; ++chunk) {
    for (int step = 0; step < R; ++step) {
      const int source = (me + step) % R, chunks = cut.chunks(args.tokens_of[source]);
      if (chunk >= chunks) continue;
      const PullFrom from = pull_from(layout.shape.topology, me, source);
      const bool landed = sends_ahead(layout);
      const auto first_row = [&] {  // of the chunk
        if (landed) return layout.landed_row(me, source, static_cast<int>(cut.first(chunk)));
        if (from.relay_domain >= 0) return layout.relay_pull_row(from.relay_domain, chunk, 0);
        return args.registered[source] ? layout.registered_row(static_cast<int>(cut.first(chunk)))
                                       : layout.pull_row(chunk, 0);
      };
      const Status status = crew.step(
          [&](auto& exchange) {
            return source == me ? Status::arrived : exchange.arrive(from.channel, from.line, chunk);
          },
          [&](auto& mem, const auto& lanes) {
            const Range mine = share(turned(lanes, chunk + step), rows_of(lanes, chunk, step));
            if (mine.begin < mine.end) row.expect(mine.begin);
            auto tokens = ints(lanes, list.token, mine);
            // What all rows of the step share is looked up once: a mover has hardly time for more than the rows.
            const bool is_mine = source == me;
            const char* const x = static_cast<const char*>(args.x);
            const std::int64_t first = cut.first(chunk);
            const std::size_t first_at = is_mine ? 0 : first_row(), stride = layout.shape.pull_row_bytes;
            const int owner = landed ? me : from.owner;
            const auto at = [&](int j) -> const void* {
              const int token = tokens[j];
              return is_mine ? x + token * row_bytes
                             : mem.view(owner, first_at + (token - first) * stride, row_bytes);
            };
            const void* next = mine.begin < mine.end ? at(mine.begin) : nullptr;
            for (int j = mine.begin; j < mine.end; ++j) {
              const void* const now = next;
              next = j + 1 < mine.end ? at(j + 1) : nullptr;
              row.place(j, now, next);
            }
          },
          [&](auto& exchange) {
            if (source != me) exchange.release(from.channel, from.line, chunk, chunk + 1 == chunks);
          });
      if (status != Status::arrived) return status;
    }
  }
  return Status::arrived;
}

/// Relay: pulls each row that my domain needs from the sources on my rail, once, and offers it inside the domain.
template <class Crew>
FLEXEP_HD Status relay_rows(Crew& crew, const DeliverArgs& args) {
  const WindowLayout& layout = crew.layout();
  const Topology& topology = layout.shape.topology;
  const Cut cut = pull_cut(layout);
  const int me = crew.rank();
  const auto row_bytes = static_cast<std::size_t>(args.hidden * size_of(args.dtype));
  const Relayed& list = args.relayed;
  for (int chunk = 0, most = most_chunks(args.tokens_of, topology.ranks, cut); chunk < most; ++chunk) {
    for (int step = 1; step < topology.domains(); ++step) {
      const int domain = (topology.domain(me) + step) % topology.domains();
      const int source = topology.rank_of(domain, topology.index(me)),
                chunks = cut.chunks(args.tokens_of[source]);
      if (chunk >= chunks) continue;
      const auto forward = [&](auto& mem, const auto& lanes) {
        const Range all = in_chunk(lanes, list.token, {list.base[domain], list.base[domain + 1]}, cut, chunk);
        const Range mine = share(turned(lanes, chunk + step), all);
        auto tokens = ints(lanes, list.token, mine);
        for (int q = mine.begin; q < mine.end; ++q) {
          const int token = tokens[q];
          const auto in_slot = static_cast<int>(token - cut.first(chunk));
          const std::size_t from =
              args.registered[source] ? layout.registered_row(token) : layout.pull_row(chunk, in_slot);
          mem.put(me, layout.relay_pull_row(domain, chunk, in_slot), mem.view(source, from, row_bytes),
                  row_bytes);
        }
      };
      const auto in = [&](int) { return Topology::direct(me, source); };
      const auto out = [&](int index) {
        return topology.from_relay(source, topology.rank_of(topology.domain(me), index));
      };
      const Status status = relay_chunk(crew, Channel::pull, 1, in, Channel::relay_pull, topology.domain_size,
                                        out, chunk, chunk + 1 == chunks, forward);
      if (status != Status::arrived) return status;
    }
  }
  return Status::arrived;
}

}  // namespace flexep
