// The window: the only memory that peers can see. One layout, the same on every rank, for host, device and tests.
#pragma once
#include <cstddef>
#include <cstdint>

#include "base/layout.h"
#include "proto/topology.h"
#include "proto/words.h"

namespace flexep {

/// What fixes a window's layout. A chunk is a range of source tokens, cut alike on all ranks; a ring holds `slots`
/// chunks of a line.
struct WindowShape {
  Topology topology;
  int slots;            // chunks a ring holds for each line
  int pull_tokens;      // tokens of a chunk of a pull (dispatch)
  int push_tokens;      // tokens of a chunk of a push (combine)
  int pull_row_bytes;   // one row of x; a multiple of 16
  int push_row_bytes;   // one partial row as it travels; a multiple of 16
  int mail_bytes;       // bytes of a chunk of records
  int board_ints;       // integers a rank may publish at once
  int registered_rows;  // rows of x that live here for good (zero copy); 0: none
};

struct WindowLayout {
  static constexpr std::size_t kAlign =
      128;  // a writer's array of words shares no cache line with another kind

  WindowShape shape;
  Span<Signal> words[kWordKinds];  // [ranks] each
  Span<FaultRecord> faults;        // [ranks], by writer
  Span<std::int32_t> board;  // [2][ranks][board_ints]: two, because a peer may still read the one before
  Span<char> mail;           // [ranks, by sender][slots][mail_bytes]
  Span<char> pull;           // [slots][pull_tokens][pull_row_bytes], my own rows
  Span<char> relay_pull;     // [source domain][slots][pull_tokens][pull_row_bytes]; none with one domain
  Span<char> push;        // [line][slots][push_tokens][push_row_bytes]; by sender, or by domain of the relay
  Span<char> relay_push;  // [source domain * S + index][slots][push_tokens][push_row_bytes]
  Span<char> registered;  // [registered_rows][pull_row_bytes]
  std::size_t bytes;

  FLEXEP_HD constexpr explicit WindowLayout(const WindowShape& s) : shape(s), bytes(0) {
    const auto R = static_cast<std::size_t>(s.topology.ranks);
    const auto D = static_cast<std::size_t>(s.topology.domains());
    const auto slots = static_cast<std::size_t>(s.slots);
    const std::size_t pull_line = slots * s.pull_tokens * s.pull_row_bytes;
    const std::size_t push_line = slots * s.push_tokens * s.push_row_bytes;
    Cursor cursor;
    for (auto& word : words) word = cursor.take<Signal>(R, kAlign);
    faults = cursor.take<FaultRecord>(R, kAlign);
    board = cursor.take<std::int32_t>(2 * R * s.board_ints, kAlign);
    mail = cursor.take<char>(R * slots * s.mail_bytes, kAlign);
    pull = cursor.take<char>(pull_line, kAlign);
    relay_pull = cursor.take<char>(D > 1 ? D * pull_line : 0, kAlign);
    push = cursor.take<char>((D > 1 ? D : R) * push_line, kAlign);
    relay_push = cursor.take<char>(D > 1 ? R * push_line : 0, kAlign);
    registered = cursor.take<char>(static_cast<std::size_t>(s.registered_rows) * s.pull_row_bytes, kAlign);
    bytes = cursor.bytes(kAlign);
  }

  FLEXEP_HD constexpr std::size_t word(Word kind, int index) const {
    return words[static_cast<int>(kind)].of(static_cast<std::size_t>(index));
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

 private:
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
