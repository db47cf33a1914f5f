// Records of a few words between all ranks: what travels beside rows, and counts.
#pragma once
#include "kernels/args.h"
#include "kernels/chunks.h"
#include "proto/barrier.h"
#include "proto/exchange.h"

namespace flexep {

/// How records are cut: bytes of a list in one rank's order. A chunk holds at least one record.
FLEXEP_HD constexpr Cut mail_cut(const WindowLayout& layout) {
  return {layout.shape.mail_bytes, layout.shape.mail_slices(), layout.slice};
}

/// Bytes that precede each rank's part of a list of records in rank order.
FLEXEP_HD std::int64_t bytes_before(const std::int32_t* splits, int rank, std::int64_t record_bytes) {
  std::int64_t records = 0;
  for (int r = 0; r < rank; ++r) records += splits[r];
  return records * record_bytes;
}

/// A lane's share of a chunk: bytes from its first, in pieces of 16 where they divide.
template <class Lanes>
FLEXEP_HD Range share_bytes(const Lanes& lanes, const Cut& cut, int chunk, std::int64_t all) {
  const std::int64_t left = all - cut.first(chunk), bytes = left < cut.size ? left : cut.size;
  const Range pieces = share(lanes, {0, static_cast<int>(ceil_div(bytes, std::int64_t{16}))});
  return {16 * pieces.begin, static_cast<int>(bytes < 16 * pieces.end ? bytes : 16 * pieces.end)};
}

/// Whether all that a rank sends fits into the rings: sending then waits for nothing that this operation frees, and the
/// lane that sends may take afterwards.
FLEXEP_HD bool records_fit(const WindowLayout& layout, int me, const RecordArgs& args) {
  for (int r = 0; r < layout.shape.topology.ranks; ++r)
    if (r != me && mail_cut(layout).chunks(args.send_splits[r] * args.record_bytes) > layout.shape.slots)
      return false;
  return true;
}

template <class Mem, class Team>
FLEXEP_HD Status send_records(Exchange<Mem, Team>& exchange, const RecordArgs& args) {
  const WindowLayout& layout = exchange.layout();
  const Cut cut = mail_cut(layout);
  const int R = layout.shape.topology.ranks, me = exchange.rank();
  bool more = true;
  for (int chunk = 0; more; ++chunk) {
    more = false;
    for (int step = 1; step < R; ++step) {
      const int peer = (me + step) % R;
      const std::int64_t all = args.send_splits[peer] * args.record_bytes;
      if (chunk >= cut.chunks(all)) continue;
      more = true;
      const Line line = Topology::direct(me, peer);
      const Status status = exchange.claim(Channel::mail, line, chunk);
      if (status != Status::arrived) return status;
      const Range mine = share_bytes(exchange.team(), cut, chunk, all);
      if (mine.begin < mine.end)
        exchange.mem().put(peer, layout.mail_slot(me, chunk) + mine.begin,
                           static_cast<const char*>(args.send) +
                               bytes_before(args.send_splits, peer, args.record_bytes) + cut.first(chunk) +
                               mine.begin,
                           static_cast<std::size_t>(mine.end - mine.begin));
      exchange.settle();
      exchange.announce(Channel::mail, line, chunk);
    }
  }
  return Status::arrived;
}

/// `copy(to, from, bytes)` moves bytes inside this rank; my own records go the same way.
template <class Mem, class Team, class Copy>
FLEXEP_HD Status take_records(Exchange<Mem, Team>& exchange, const RecordArgs& args, const Copy& copy) {
  const WindowLayout& layout = exchange.layout();
  const Cut cut = mail_cut(layout);
  const int R = layout.shape.topology.ranks, me = exchange.rank();
  bool more = true;
  for (int chunk = 0; more; ++chunk) {
    more = false;
    for (int step = 0; step < R; ++step) {
      const int peer = (me + step) % R;
      const std::int64_t all = args.recv_splits[peer] * args.record_bytes;
      const int chunks = cut.chunks(all);
      if (chunk >= chunks) continue;
      more = true;
      const Line line = Topology::direct(me, peer);
      if (peer != me) {
        const Status status = exchange.arrive(Channel::mail, line, chunk);
        if (status != Status::arrived) return status;
      }
      const Range mine = share_bytes(exchange.team(), cut, chunk, all);
      if (mine.begin < mine.end) {
        const auto bytes = static_cast<std::size_t>(mine.end - mine.begin);
        const std::int64_t at = cut.first(chunk) + mine.begin;
        const void* const from =
            peer == me ? static_cast<const char*>(args.send) +
                             bytes_before(args.send_splits, me, args.record_bytes) + at
                       : exchange.mem().view(me, layout.mail_slot(peer, chunk) + mine.begin, bytes);
        copy(static_cast<char*>(args.recv) + bytes_before(args.recv_splits, peer, args.record_bytes) + at,
             from, bytes);
      }
      if (peer == me) continue;
      exchange.settle();
      exchange.release(Channel::mail, line, chunk, chunk + 1 == chunks);
    }
  }
  return Status::arrived;
}

/// Publishes my integers and copies everybody's out of the board.
template <class Mem, class Team, class Copy>
FLEXEP_HD Status publish_ints(Exchange<Mem, Team>& exchange, int page, const PublishArgs& args,
                              const Copy& copy) {
  const Status status = publish(exchange, page, args.ints, args.count);
  if (status != Status::arrived) return status;
  const int R = exchange.topology().ranks, me = exchange.rank();
  const auto bytes = static_cast<std::size_t>(args.count) * sizeof(std::int32_t);
  for (int r = exchange.team().rank(); r < R && bytes > 0; r += exchange.team().size())
    copy(reinterpret_cast<char*>(args.all) + r * bytes,
         exchange.mem().view(me, exchange.layout().board_row(page, r), bytes), bytes);
  return Status::arrived;
}

}  // namespace flexep
