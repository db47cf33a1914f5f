// The window: the only memory that peers can see. One layout, the same on every rank, for host, device and tests.
#pragma once
#include <cstddef>
#include <cstdint>

#include "base/layout.h"
#include "proto/topology.h"
#include "proto/words.h"

namespace flexep {

constexpr int kMostMailSlices = 64;

/// What fixes a window's layout. A chunk is a range of source tokens, cut alike on all ranks; a ring holds `slots`
/// chunks of a line. Slices take turns: chunk g of an operation is chunk g / slices of slice g % slices (see Cut).
/// Teams that share no word and no ring serve them side by side, so a word keeps one writer and one reader.
struct WindowShape {
  Topology topology;
  int slices;           // parts of an operation's chunks; each has words and rings of its own
  int slots;            // chunks a ring holds for each line
  int pull_tokens;      // tokens of a chunk of a pull (dispatch)
  int push_tokens;      // tokens of a chunk of a push (combine)
  int pull_row_bytes;   // one row of x; a multiple of 16
  int push_row_bytes;   // one partial row as it travels; a multiple of 16
  int mail_bytes;       // bytes of a chunk of records
  int board_ints;       // integers a rank may publish at once
  int registered_rows;  // rows of x that live here for good (zero copy); 0: none
  int landed_rows;      // rows of x that each peer sends ahead of the plan; 0: rows are pulled out of rings

  /// Slices that exchange records: with more, they have few each, and meeting takes longer.
  FLEXEP_HD constexpr int mail_slices() const { return slices < kMostMailSlices ? slices : kMostMailSlices; }
};

struct WindowLayout {
  static constexpr std::size_t kAlign =
      128;  // a writer's array of words shares no cache line with another kind

  WindowShape shape;
  int slice;                       // whose words and rings are meant below
  Span<Signal> words[kWordKinds];  // [slices][ranks], but `published` and `stopped` are [ranks]
  Span<FaultRecord> faults;        // [ranks], by writer
  Span<std::int32_t> board;  // [2][ranks][board_ints]: two, because a peer may still read the one before
  // Each of these [slices] times, mail [mail_slices] times:
  Span<char> mail;        // [ranks, by sender][slots][mail_bytes]
  Span<char> pull;        // [slots][pull_tokens][pull_row_bytes], my own rows; none if they are sent ahead
  Span<char> relay_pull;  // [source domain][slots][pull_tokens][pull_row_bytes]; none with one domain
  Span<char> push;        // [line][slots][push_tokens][push_row_bytes]; by sender, or by domain of the relay
  Span<char> relay_push;  // [source domain * S + index][slots][push_tokens][push_row_bytes]
  // Once:
  Span<char> registered;  // [registered_rows][pull_row_bytes]
  Span<char> landed;      // [peer, without me][landed_rows][pull_row_bytes]
  std::size_t bytes;

  FLEXEP_HD constexpr explicit WindowLayout(const WindowShape& s) : shape(s), slice(0), bytes(0) {
    const auto R = static_cast<std::size_t>(s.topology.ranks);
    const auto slices = static_cast<std::size_t>(s.slices);
    Cursor cursor;
    for (int kind = 0; kind < kWordKinds; ++kind)
      words[kind] = cursor.take<Signal>(is_sliced(static_cast<Word>(kind)) ? slices * R : R, kAlign);
    faults = cursor.take<FaultRecord>(R, kAlign);
    board = cursor.take<std::int32_t>(2 * R * s.board_ints, kAlign);
    const SliceBytes of = slice_bytes();
    mail = cursor.take<char>(static_cast<std::size_t>(s.mail_slices()) * of.mail, kAlign);
    pull = cursor.take<char>(slices * of.pull, kAlign);
    relay_pull = cursor.take<char>(slices * of.relay_pull, kAlign);
    push = cursor.take<char>(slices * of.push, kAlign);
    relay_push = cursor.take<char>(slices * of.relay_push, kAlign);
    registered = cursor.take<char>(static_cast<std::size_t>(s.registered_rows) * s.pull_row_bytes, kAlign);
    landed = cursor.take<char>((R - 1) * s.landed_rows * s.pull_row_bytes, kAlign);
    bytes = cursor.bytes(kAlign);
  }

  /// Seen from slice 0: the same window as the teams of slice `index` use it.
  FLEXEP_HD constexpr WindowLayout of_slice(int index) const {
    WindowLayout of = *this;
    of.slice = index;
    const auto n = static_cast<std::size_t>(index);
    for (int kind = 0; kind < kWordKinds; ++kind)
      if (is_sliced(static_cast<Word>(kind)))
        of.words[kind].at += n * static_cast<std::size_t>(shape.topology.ranks) * sizeof(Signal);
    const SliceBytes each = slice_bytes();
    of.mail.at += n * each.mail, of.pull.at += n * each.pull, of.push.at += n * each.push;
    of.relay_pull.at += n * each.relay_pull, of.relay_push.at += n * each.relay_push;
    return of;
  }

  FLEXEP_HD constexpr std::size_t word(Word kind, int index) const {
    return words[static_cast<int>(kind)].of(static_cast<std::size_t>(index));
  }
  /// The same of any slice.
  FLEXEP_HD constexpr std::size_t slice_word(Word kind, int of_slice, int index) const {
    return word(kind, (of_slice - slice) * shape.topology.ranks + index);
  }
  FLEXEP_HD constexpr std::size_t board_row(int parity, int writer) const {
    return board.of((static_cast<std::size_t>(parity) * shape.topology.ranks + writer) * shape.board_ints);
  }
  FLEXEP_HD constexpr std::size_t mail_slot(int sender, int chunk) const {
    return mail.at +
           (static_cast<std::size_t>(sender) * shape.slots + chunk % shape.slots) * shape.mail_bytes;
  }
  /// Row of a token inside the chunk's slot; `token` counts from the chunk's first. My own rows.
  FLEXEP_HD constexpr std::size_t pull_row(int chunk, int token) const {
    return pull.at + pull_offset(chunk, token);
  }
  /// The same for rows that came over the rail from `source_domain`.
  FLEXEP_HD constexpr std::size_t relay_pull_row(int source_domain, int chunk, int token) const {
    return relay_pull.at + source_domain * pull_line_bytes() + pull_offset(chunk, token);
  }
  FLEXEP_HD constexpr std::size_t push_row(int line, int chunk, int token) const {
    return push.at + line * push_line_bytes() + push_offset(chunk, token);
  }
  FLEXEP_HD constexpr std::size_t relay_push_row(int line, int chunk, int token) const {
    return relay_push.at + line * push_line_bytes() + push_offset(chunk, token);
  }
  FLEXEP_HD constexpr std::size_t registered_row(int token) const {
    return registered.at + static_cast<std::size_t>(token) * shape.pull_row_bytes;
  }
  /// Where the window of `reader` has a token of another rank that was sent ahead.
  FLEXEP_HD constexpr std::size_t landed_row(int reader, int source, int token) const {
    const auto line = static_cast<std::size_t>(source < reader ? source : source - 1);
    return landed.at + (line * shape.landed_rows + token) * shape.pull_row_bytes;
  }

 private:
  struct SliceBytes {
    std::size_t mail, pull, relay_pull, push, relay_push;
  };
  FLEXEP_HD constexpr SliceBytes slice_bytes() const {
    const auto R = static_cast<std::size_t>(shape.topology.ranks);
    const auto D = static_cast<std::size_t>(shape.topology.domains());
    const bool relays = D > 1;
    const std::size_t pulled = shape.landed_rows > 0 ? 0 : pull_line_bytes();
    return {R * shape.slots * shape.mail_bytes, pulled, relays ? D * pull_line_bytes() : 0,
            (relays ? D : R) * push_line_bytes(), relays ? R * push_line_bytes() : 0};
  }
  FLEXEP_HD constexpr std::size_t pull_line_bytes() const {
    return static_cast<std::size_t>(shape.slots) * shape.pull_tokens * shape.pull_row_bytes;
  }
  FLEXEP_HD constexpr std::size_t push_line_bytes() const {
    return static_cast<std::size_t>(shape.slots) * shape.push_tokens * shape.push_row_bytes;
  }
  FLEXEP_HD constexpr std::size_t pull_offset(int chunk, int token) const {
    return (static_cast<std::size_t>(chunk % shape.slots) * shape.pull_tokens + token) * shape.pull_row_bytes;
  }
  FLEXEP_HD constexpr std::size_t push_offset(int chunk, int token) const {
    return (static_cast<std::size_t>(chunk % shape.slots) * shape.push_tokens + token) * shape.push_row_bytes;
  }
};

}  // namespace flexep
