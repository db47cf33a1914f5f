// Two hops: a relay hands chunks on between the rail and its own domain. Of a pull it has one line in (the source) and
// one out for each member of the domain; of a push one in for each member and one out (the home).
#pragma once
#include "proto/crew.h"

namespace flexep {

/// Moves one chunk on: waits until the slot it goes to is free for every reader and until the chunk has come from every
/// writer, calls `move(mem, lanes)` (views of what came in, puts of what goes out), passes the news on, and only then
/// gives the incoming slots back. `in(i)` and `out(i)` are lines, `last` says that no chunk of this source follows.
template <class Crew, class In, class Out, class Move>
FLEXEP_HD Status relay_chunk(Crew& crew, Channel from, int num_in, const In& in, Channel to, int num_out,
                             const Out& out, int chunk, bool last, const Move& move) {
  return crew.step(
      [&](auto& exchange) {
        for (int i = 0; i < num_out; ++i) {
          const Status status = exchange.claim(to, out(i), chunk);
          if (status != Status::arrived) return status;
        }
        for (int i = 0; i < num_in; ++i) {
          const Status status = exchange.arrive(from, in(i), chunk);
          if (status != Status::arrived) return status;
        }
        return Status::arrived;
      },
      move,
      [&](auto& exchange) {
        for (int i = 0; i < num_out; ++i) exchange.announce(to, out(i), chunk);
        for (int i = 0; i < num_in; ++i) exchange.release(from, in(i), chunk, last);
      });
}

}  // namespace flexep
