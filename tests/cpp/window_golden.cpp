// The window's layout, fixed by numbers: it is the same on host, device and in another process, so a change must be meant.
// Nothing runs; compiling is the test.
#include <cstddef>

#include "proto/state.h"
#include "proto/window.h"

namespace {

using namespace flexep;

struct Part {
  std::size_t at, bytes;
};
constexpr int kParts = kWordKinds + 9;
struct Parts {
  Part parts[kParts];
};

constexpr Parts parts_of(const WindowLayout& w) {
  Parts all{};
  for (int i = 0; i < kWordKinds; ++i) all.parts[i] = {w.words[i].at, w.words[i].bytes()};
  const Part rest[] = {{w.faults.at, w.faults.bytes()},
                       {w.board.at, w.board.bytes()},
                       {w.mail.at, w.mail.bytes()},
                       {w.pull.at, w.pull.bytes()},
                       {w.relay_pull.at, w.relay_pull.bytes()},
                       {w.push.at, w.push.bytes()},
                       {w.relay_push.at, w.relay_push.bytes()},
                       {w.registered.at, w.registered.bytes()},
                       {w.landed.at, w.landed.bytes()}};
  for (int i = 0; i < 9; ++i) all.parts[kWordKinds + i] = rest[i];
  return all;
}

constexpr bool is_apart(const WindowLayout& w) {
  const Parts all = parts_of(w);
  for (const Part& a : all.parts) {
    if (a.at % WindowLayout::kAlign != 0 || a.at + a.bytes > w.bytes) return false;
    for (const Part& b : all.parts)
      if (&a != &b && a.bytes > 0 && b.bytes > 0 && a.at < b.at + b.bytes && b.at < a.at + a.bytes)
        return false;
  }
  return w.bytes % WindowLayout::kAlign == 0;
}

/// Whether rows (line, chunk, token) of a ring follow each other without a gap, fill the ring, and repeat after `slots`.
template <class At>
constexpr bool fills(Part ring, int lines, int slots, int tokens, std::size_t row_bytes, const At& at) {
  std::size_t next = ring.at;
  for (int line = 0; line < lines; ++line)
    for (int chunk = 0; chunk < slots; ++chunk)
      for (int token = 0; token < tokens; ++token, next += row_bytes)
        if (at(line, chunk, token) != next || at(line, chunk + slots, token) != next) return false;
  return next == ring.at + ring.bytes;
}

constexpr bool is_filled(const WindowLayout& w) {
  const WindowShape& s = w.shape;
  const int R = s.topology.ranks, D = s.topology.domains();
  const Part pull{w.pull.at, w.pull.bytes()}, push{w.push.at, w.push.bytes()};
  const Part relay_pull{w.relay_pull.at, w.relay_pull.bytes()};
  const Part relay_push{w.relay_push.at, w.relay_push.bytes()};
  const Part mail{w.mail.at, w.mail.bytes()};
  return fills(mail, R, s.slots, 1, s.mail_bytes, [&](int r, int c, int) { return w.mail_slot(r, c); }) &&
         fills(pull, 1, s.slots, s.pull_tokens, s.pull_row_bytes,
               [&](int, int c, int t) { return w.pull_row(c, t); }) &&
         fills(relay_pull, D > 1 ? D : 0, s.slots, s.pull_tokens, s.pull_row_bytes,
               [&](int d, int c, int t) { return w.relay_pull_row(d, c, t); }) &&
         fills(push, D > 1 ? D : R, s.slots, s.push_tokens, s.push_row_bytes,
               [&](int l, int c, int t) { return w.push_row(l, c, t); }) &&
         fills(relay_push, D > 1 ? R : 0, s.slots, s.push_tokens, s.push_row_bytes,
               [&](int l, int c, int t) { return w.relay_push_row(l, c, t); });
}

/// Whether every window has a place of its own for each row that any peer sends ahead, and none left over.
constexpr bool lands_apart(const WindowLayout& w) {
  const int R = w.shape.topology.ranks;
  for (int reader = 0; reader < R; ++reader) {
    std::size_t next = w.landed.at;
    for (int source = 0; source < R; ++source) {
      if (source == reader) continue;
      for (int token = 0; token < w.shape.landed_rows; ++token, next += w.shape.pull_row_bytes)
        if (w.landed_row(reader, source, token) != next) return false;
    }
    if (next != w.landed.at + w.landed.bytes()) return false;
  }
  return true;
}

constexpr WindowLayout flat({.topology = {.ranks = 3, .domain_size = 3},
                             .slices = 1,
                             .slots = 2,
                             .pull_tokens = 4,
                             .push_tokens = 2,
                             .pull_row_bytes = 32,
                             .push_row_bytes = 16,
                             .mail_bytes = 48,
                             .board_ints = 5,
                             .registered_rows = 6,
                             .landed_rows = 0});
static_assert(is_apart(flat) && is_filled(flat));
static_assert(flat.word(Word::published, 0) == 0);
static_assert(flat.word(Word::mailed, 1) == 136);
static_assert(flat.word(Word::stopped, 2) == 1424);
static_assert(flat.faults.at == 1536);
static_assert(flat.board.at == 1792 && flat.board_row(1, 2) == 1892);
static_assert(flat.mail.at == 1920 && flat.mail_slot(1, 2) == 2016);
static_assert(flat.pull.at == 2304 && flat.pull_row(1, 3) == 2528);
static_assert(flat.relay_pull.bytes() == 0);
static_assert(flat.push.at == 2560 && flat.push_row(2, 1, 1) == 2736);
static_assert(flat.relay_push.bytes() == 0);
static_assert(flat.registered.at == 2816 && flat.registered_row(5) == 2976);
static_assert(flat.landed.bytes() == 0);
static_assert(flat.bytes == 3072);

constexpr WindowLayout two({.topology = {.ranks = 4, .domain_size = 2},
                            .slices = 1,
                            .slots = 3,
                            .pull_tokens = 2,
                            .push_tokens = 5,
                            .pull_row_bytes = 16,
                            .push_row_bytes = 64,
                            .mail_bytes = 32,
                            .board_ints = 2,
                            .registered_rows = 0,
                            .landed_rows = 0});
static_assert(is_apart(two) && is_filled(two));
static_assert(two.word(Word::relay_consumed, 3) == 1304);
static_assert(two.faults.at == 1536 && two.faults.of(3) == 1680);
static_assert(two.board.at == 1792 && two.board_row(1, 2) == 1840);
static_assert(two.mail.at == 1920);
static_assert(two.pull.at == 2304 && two.pull_row(2, 1) == 2384);
static_assert(two.relay_pull.at == 2432 && two.relay_pull_row(1, 2, 1) == 2608);
static_assert(two.push.at == 2688 && two.push_row(1, 1, 1) == 4032);
static_assert(two.relay_push.at == 4608 && two.relay_push_row(3, 2, 4) == 8384);
static_assert(two.registered.bytes() == 0 && two.landed.bytes() == 0);
static_assert(two.bytes == 8448);

/// Two slices: every channel twice, the rest once.
constexpr WindowLayout sliced({.topology = {.ranks = 4, .domain_size = 2},
                               .slices = 2,
                               .slots = 3,
                               .pull_tokens = 2,
                               .push_tokens = 5,
                               .pull_row_bytes = 16,
                               .push_row_bytes = 64,
                               .mail_bytes = 32,
                               .board_ints = 2,
                               .registered_rows = 7,
                               .landed_rows = 0});
constexpr WindowLayout second = sliced.of_slice(1);
static_assert(is_apart(sliced) && second.slice == 1 && second.bytes == sliced.bytes);
static_assert(sliced.words[0].count == 4 && sliced.words[1].count == 8 && sliced.words[11].count == 4);
static_assert(second.word(Word::published, 3) == sliced.word(Word::published, 3));
static_assert(second.word(Word::stopped, 3) == sliced.word(Word::stopped, 3));
static_assert(second.word(Word::mailed, 0) == sliced.word(Word::mailed, 3) + sizeof(Signal));
static_assert(sliced.slice_word(Word::offered, 1, 2) == second.word(Word::offered, 2) &&
              second.slice_word(Word::consumed, 0, 3) == sliced.word(Word::consumed, 3) &&
              second.slice_word(Word::consumed, 1, 3) == second.word(Word::consumed, 3));
static_assert(second.faults.at == sliced.faults.at && second.board.at == sliced.board.at);
static_assert(second.registered.at == sliced.registered.at && sliced.registered.count == 7 * 16);
static_assert(second.mail_slot(0, 0) == sliced.mail_slot(3, 2) + 32);
static_assert(second.pull_row(0, 0) == sliced.pull_row(2, 1) + 16);
static_assert(second.relay_pull_row(0, 0, 0) == sliced.relay_pull_row(1, 2, 1) + 16);
static_assert(second.push_row(0, 0, 0) == sliced.push_row(1, 2, 4) + 64);
static_assert(second.relay_push_row(0, 0, 0) == sliced.relay_push_row(3, 2, 4) + 64);
static_assert(second.relay_push_row(3, 2, 4) + 64 == sliced.relay_push.at + sliced.relay_push.bytes());

/// Rows are sent ahead: a place for each row of each peer, once for all slices, and no ring for rows that are pulled.
constexpr WindowLayout ahead({.topology = {.ranks = 3, .domain_size = 3},
                              .slices = 2,
                              .slots = 2,
                              .pull_tokens = 4,
                              .push_tokens = 2,
                              .pull_row_bytes = 32,
                              .push_row_bytes = 16,
                              .mail_bytes = 48,
                              .board_ints = 5,
                              .registered_rows = 6,
                              .landed_rows = 5});
static_assert(is_apart(ahead) && lands_apart(ahead));
static_assert(ahead.pull.bytes() == 0 && ahead.push.at == 2560);
static_assert(ahead.landed.at == 3200 && ahead.landed.count == 2 * 5 * 32);
static_assert(ahead.landed_row(0, 1, 0) == 3200 && ahead.landed_row(0, 2, 4) == 3488);
static_assert(ahead.landed_row(1, 0, 2) == 3264 && ahead.landed_row(1, 2, 0) == 3360);
static_assert(ahead.landed_row(2, 1, 3) == 3456);
static_assert(ahead.bytes == 3584);
static_assert(lands_apart(ahead.of_slice(1)) && ahead.of_slice(1).landed.at == ahead.landed.at);

// What lies in windows or beside them is the same for every compiler.
static_assert(sizeof(FaultRecord) == 48 && offsetof(FaultRecord, want) == 32);
static_assert(sizeof(WindowState) == 24 && offsetof(WindowState, stopped) == 16);
static_assert(make_signal(3, 5, 7) == ((3ull << 28) | (5ull << 8) | 7ull));
static_assert(has_reached(make_signal(1, 0, 2), make_signal(0, kMaxChunks, 1)));
static_assert(!has_reached(make_signal(1, 4, 9), make_signal(1, 5, 1)));
static_assert(has_reached(make_signal(0, 0, 1), make_signal((Epoch{1} << 36) - 1, 3, 1)));

/// A line is written at one end where it is read at the other, on every channel, whatever the ranks.
constexpr bool lines_match(const Topology& t) {
  for (int a = 0; a < t.ranks; ++a)
    for (int b = 0; b < t.ranks; ++b) {
      const Line mine = Topology::direct(a, b), yours = Topology::direct(b, a);
      if (mine.peer != b || mine.here != yours.there || mine.there != yours.here) return false;
    }
  for (int source = 0; source < t.ranks; ++source)
    for (int member = 0; member < t.ranks; ++member) {
      const int relay = t.relay(source, member);
      const Line out = t.from_relay(source, member), in = t.to_relay(source, member);
      if (t.domain(relay) != t.domain(member) || t.index(relay) != t.index(source)) return false;
      if (out.peer != member || in.peer != relay) return false;
      if (out.here != in.there || out.there != in.here) return false;
    }
  return true;
}
/// No two lines of a rank share a word.
constexpr bool lines_are_apart(const Topology& t) {
  for (int a = 0; a < t.ranks * t.ranks; ++a)
    for (int b = 0; b < a; ++b) {
      const int source = a / t.ranks, member = a % t.ranks, source2 = b / t.ranks, member2 = b % t.ranks;
      if (t.relay(source, member) == t.relay(source2, member2) &&
          t.from_relay(source, member).here == t.from_relay(source2, member2).here)
        return false;
      if (member == member2 && t.to_relay(source, member).here == t.to_relay(source2, member2).here)
        return false;
    }
  return true;
}
static_assert(lines_match({4, 2}) && lines_match({6, 3}) && lines_match({6, 2}) && lines_match({5, 1}));
static_assert(lines_are_apart({4, 2}) && lines_are_apart({6, 3}) && lines_are_apart({5, 1}));

}  // namespace
