// Waiting for a word: the loop is protocol, how to pass the time is Mem's.
#pragma once
#include <cstddef>

#include "base/hd.h"
#include "proto/window.h"

namespace flexep {

/// What Mem::idle says after a look in vain: look again, look at the stop words too, or give up.
enum class Idle : int { again, look_around, expired };

/// What a Mem keeps while one wait lasts. `seconds` is set by the wait, the rest belongs to the Mem.
struct Clock {
  double seconds;
  std::int64_t began = 0;
  std::uint32_t looks = 0;
};

struct Waited {
  Status status;
  Signal got;
  int by;  // the rank that stopped the window, if one did
};

/// Whether a signal that is far enough is of the operation that waits for it. A writer cannot get ahead of its reader by
/// an epoch, so a chunk of a later one means that the two run different operations; a reader that has given everything
/// back is an epoch ahead, and so may be a rank that has published twice.
FLEXEP_HD constexpr bool belongs(Word word, Signal got, Signal want) {
  if (epoch_of(got) != epoch_of(want)) return !is_ready_word(word);
  return op_of(got) == op_of(want) || chunks_of(got) == 0;
}

/// Waits until the word reaches `want`. A peer that gave up ends the wait at once; a peer that left ends it only if it
/// is the awaited one and its word, read again after that, is still not enough: all it had to say was posted before.
template <class Mem>
FLEXEP_HD Waited wait_for(Mem& mem, const WindowLayout& layout, Word word, int index, Signal want,
                          int awaited, double seconds) {
  const std::size_t at = layout.word(word, index);
  Clock clock{seconds};
  for (;;) {
    const Signal got = mem.load(at);
    if (has_reached(got, want))
      return {belongs(word, got, want) ? Status::arrived : Status::mismatched, got, -1};
    const Idle next = mem.idle(at, got, clock);
    if (next == Idle::again) continue;
    for (int peer = 0; peer < layout.shape.topology.ranks; ++peer)
      if (mem.load(layout.word(Word::stopped, peer)) == kGaveUp) return {Status::stopped, got, peer};
    if (mem.load(layout.word(Word::stopped, awaited)) == kLeft) {
      const Signal last = mem.load(at);
      if (!has_reached(last, want)) return {Status::left, last, -1};
      continue;
    }
    if (next == Idle::expired) {
      const Signal last = mem.load(at);
      if (!has_reached(last, want)) return {Status::expired, last, -1};
    }
  }
}

}  // namespace flexep
