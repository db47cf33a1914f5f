// The table of signal words. Every word lives in the window of the rank that reads it, has one writer and one reader,
// and stands in an array of `ranks` words. Slices (window.h) have arrays of their own, but for published and stopped.
//
// | word           | index at the reader        | written by            | says                                           |
// |----------------|----------------------------|-----------------------|------------------------------------------------|
// | published      | writer                     | every rank            | my row of your board is in place               |
// | mailed         | writer                     | sender of records     | chunk c of my records is in your mail ring     |
// | mail_credit    | writer                     | receiver of records   | I have taken chunk c out of mine               |
// | delivered      | writer                     | pushing rank          | chunk c is in your push ring                   |
// | credit         | writer                     | receiver of a push    | I have taken chunk c out of my push ring       |
// | offered        | writer                     | owner of rows         | chunk c lies in my pull ring                   |
// | consumed       | writer                     | puller                | I have read chunk c                            |
// | relay_delivered| source domain * S + writer's index | pushing rank  | chunk c for that source is in your relay ring  |
// | relay_credit   | source                     | relay                 | I have taken that source's chunk c             |
// | relay_offered  | source                     | relay                 | that source's chunk c lies in my relay ring    |
// | relay_consumed | source domain * S + writer's index | puller        | I have read that source's chunk c              |
// | stopped        | writer                     | every rank            | kGaveUp: see my fault record; kLeft: I am gone |
//
// S: ranks of a domain; a rank's index is its place inside its domain. Relay words serve the second hop of an
// exchange over domains (topology.h).
#pragma once
#include <cstdint>

#include "proto/signal.h"

namespace flexep {

enum class Word : std::int32_t {
  published,
  mailed,
  mail_credit,
  delivered,
  credit,
  offered,
  consumed,
  relay_delivered,
  relay_credit,
  relay_offered,
  relay_consumed,
  stopped,
};
constexpr int kWordKinds = 12;
/// The words' names, as errors say them.
constexpr const char* kWordNames[kWordKinds] = {
    "published", "mailed",          "mail_credit",  "delivered",     "credit",         "offered",
    "consumed",  "relay_delivered", "relay_credit", "relay_offered", "relay_consumed", "stopped",
};

/// A pair of words that hands chunks from a writer to a reader: `ready` (at the reader) and `free` (at the writer).
/// In a push the rows lie at the reader, in a pull at the writer; the handshake is the same.
enum class Channel : std::int32_t { mail, push, pull, relay_push, relay_pull };
constexpr int kChannels = 5;

FLEXEP_HD constexpr Word ready_word(Channel c) { return static_cast<Word>(1 + 2 * static_cast<int>(c)); }
FLEXEP_HD constexpr Word free_word(Channel c) { return static_cast<Word>(2 + 2 * static_cast<int>(c)); }
FLEXEP_HD constexpr bool is_ready_word(Word word) {
  const int kind = static_cast<int>(word);
  return kind > 0 && kind < 1 + 2 * kChannels && kind % 2 == 1;
}
/// Words that each slice of a window has for itself: those of channels.
FLEXEP_HD constexpr bool is_sliced(Word word) { return word != Word::published && word != Word::stopped; }
static_assert(is_ready_word(Word::offered) && !is_ready_word(Word::consumed) &&
              !is_ready_word(Word::stopped));
static_assert(ready_word(Channel::mail) == Word::mailed && free_word(Channel::mail) == Word::mail_credit);
static_assert(ready_word(Channel::push) == Word::delivered && free_word(Channel::push) == Word::credit);
static_assert(ready_word(Channel::pull) == Word::offered && free_word(Channel::pull) == Word::consumed);
static_assert(ready_word(Channel::relay_push) == Word::relay_delivered);
static_assert(free_word(Channel::relay_pull) == Word::relay_consumed);

/// One peer of a channel: who it is, where the word that I wait for stands in my arrays, and where the word that I post
/// stands in the peer's.
struct Line {
  int peer;
  int here;
  int there;
};

/// Values of Word::stopped.
constexpr Signal kGaveUp = 1, kLeft = 2;

/// Why a rank gave up. Written into every peer's window before Word::stopped says so.
struct FaultRecord {
  Epoch epoch = 0;
  std::int32_t op = 0;       // the caller's number of the operation
  std::int32_t status = 0;   // Status
  std::int32_t waiter = 0;   // the rank whose wait failed
  std::int32_t awaited = 0;  // the rank it waited for
  std::int32_t word = 0;     // Word
  Signal want = 0, got = 0;
};
static_assert(sizeof(FaultRecord) == 48);

}  // namespace flexep
