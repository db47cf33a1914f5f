// Records of a few words between all ranks: what travels beside rows, and counts.
#pragma once
#include "kernels/args.h"
#include "proto/barrier.h"
#include "proto/exchange.h"

namespace flexep {

/// Chunks that `count` records take through a mail ring, whose chunk holds at least one record.
FLEXEP_HD int mail_chunks(const WindowShape& shape, std::int64_t count, std::int64_t record_bytes) {
  return static_cast<int>(ceil_div(count * record_bytes, static_cast<std::int64_t>(shape.mail_bytes)));
}

/// Bytes that precede each rank's part of a list of records in rank order.
FLEXEP_HD std::int64_t bytes_before(const std::int32_t* splits, int rank, std::int64_t record_bytes) {
  std::int64_t records = 0;
  for (int r = 0; r < rank; ++r) records += splits[r];
  return records * record_bytes;
}

template <class Mem, class Team>
FLEXEP_HD Status send_records(Exchange<Mem, Team>& exchange, const RecordArgs& args) {
  const WindowShape& shape = exchange.layout().shape;
  const int R = shape.topology.ranks, me = exchange.rank();
  bool more = true;
  for (int chunk = 0; more; ++chunk) {
    more = false;
    for (int step = 1; step < R; ++step) {
      const int peer = (me + step) % R;
      if (chunk >= mail_chunks(shape, args.send_splits[peer], args.record_bytes)) continue;
      more = true;
      const Line line = Topology::direct(me, peer);
      const Status status = exchange.claim(Channel::mail, line, chunk);
      if (status != Status::arrived) return status;
      const std::int64_t done = static_cast<std::int64_t>(chunk) * shape.mail_bytes;
      const std::int64_t all = args.send_splits[peer] * args.record_bytes;
      if (exchange.team().rank() == 0)
        exchange.mem().put(
            peer, exchange.layout().mail_slot(me, chunk),
            static_cast<const char*>(args.send) + bytes_before(args.send_splits, peer, args.record_bytes) +
                done,
            static_cast<std::size_t>(all - done < shape.mail_bytes ? all - done : shape.mail_bytes));
      exchange.ready(Channel::mail, line, chunk);
    }
  }
  return Status::arrived;
}

/// `copy(to, from, bytes)` moves bytes inside this rank; my own records go the same way.
template <class Mem, class Team, class Copy>
FLEXEP_HD Status take_records(Exchange<Mem, Team>& exchange, const RecordArgs& args, const Copy& copy) {
  const WindowShape& shape = exchange.layout().shape;
  const int R = shape.topology.ranks, me = exchange.rank();
  char* const recv = static_cast<char*>(args.recv);
  if (exchange.team().rank() == 0)
    copy(recv + bytes_before(args.recv_splits, me, args.record_bytes),
         static_cast<const char*>(args.send) + bytes_before(args.send_splits, me, args.record_bytes),
         static_cast<std::size_t>(args.send_splits[me] * args.record_bytes));
  bool more = true;
  for (int chunk = 0; more; ++chunk) {
    more = false;
    for (int step = 1; step < R; ++step) {
      const int peer = (me + step) % R,
                chunks = mail_chunks(shape, args.recv_splits[peer], args.record_bytes);
      if (chunk >= chunks) continue;
      more = true;
      const Line line = Topology::direct(me, peer);
      const Status status = exchange.arrive(Channel::mail, line, chunk);
      if (status != Status::arrived) return status;
      const std::int64_t done = static_cast<std::int64_t>(chunk) * shape.mail_bytes;
      const std::int64_t all = args.recv_splits[peer] * args.record_bytes;
      const auto bytes =
          static_cast<std::size_t>(all - done < shape.mail_bytes ? all - done : shape.mail_bytes);
      if (exchange.team().rank() == 0)
        copy(recv + bytes_before(args.recv_splits, peer, args.record_bytes) + done,
             exchange.mem().view(me, exchange.layout().mail_slot(peer, chunk), bytes), bytes);
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
