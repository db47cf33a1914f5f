// A barrier that carries a few integers: every rank puts its row onto everybody's board and waits for all rows.
//
// No credits: a board has two pages, and a rank that publishes onto page p again has finished the publication in
// between, which every peer began only after it had read page p to its end.
#pragma once
#include <cstddef>
#include <cstdint>

#include "proto/exchange.h"

namespace flexep {

/// Publishes ints[0, count) and waits for everybody. Row r of the board is then at `board_row(page, r)` of my window.
/// `page` is the parity of the boards published so far, the same on every rank. A barrier is a publication of none.
template <class Mem, class Team>
FLEXEP_HD Status publish(Exchange<Mem, Team>& exchange, int page, const std::int32_t* ints, int count) {
  const WindowLayout& layout = exchange.layout();
  const int R = exchange.topology().ranks, me = exchange.rank();
  Team& team = exchange.team();
  const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(std::int32_t);
  for (int step = team.rank(); step < R && bytes > 0; step += team.size())
    exchange.mem().put((me + step) % R, layout.board_row(page, me), ints, bytes);
  exchange.settle();
  Status status = Status::arrived;
  if (team.rank() == 0) {
    const Signal done = exchange.signal(1);
    for (int step = 1; step <= R; ++step)  // my own word, which nobody else waits for, last
      exchange.mem().post((me + step) % R, layout.word(Word::published, me), done);
    for (int step = 0; step < R && status == Status::arrived; ++step)
      status = exchange.await(Word::published, (me + step) % R, done, (me + step) % R);
  }
  return static_cast<Status>(team.broadcast(static_cast<int>(status)));
}

}  // namespace flexep
