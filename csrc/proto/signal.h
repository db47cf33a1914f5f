// What a signal word holds, and how a wait can end. A signal only grows: epochs count the operations of a window, and
// inside an epoch chunks count up, so no word is ever reset and a replayed graph needs no clean-up.
#pragma once
#include <cstdint>

#include "base/hd.h"

namespace flexep {

/// epoch (36 bits) | chunks done (20 bits) | operation (8 bits). Words are zero before the first epoch, which is 1. The
/// low 32 bits differ between any two signals that a word can hold within 16 epochs: a futex watches those alone.
using Signal = std::uint64_t;
using Epoch = std::uint64_t;

constexpr int kChunkBits = 20, kOpBits = 8;
constexpr int kMaxChunks = (1 << kChunkBits) - 1;

FLEXEP_HD constexpr Signal make_signal(Epoch epoch, int chunks, int op) {
  return (epoch << (kChunkBits + kOpBits)) | (static_cast<Signal>(chunks) << kOpBits) |
         static_cast<Signal>(op);
}
FLEXEP_HD constexpr Epoch epoch_of(Signal s) { return s >> (kChunkBits + kOpBits); }
FLEXEP_HD constexpr int chunks_of(Signal s) { return static_cast<int>(s >> kOpBits) & kMaxChunks; }
FLEXEP_HD constexpr int op_of(Signal s) { return static_cast<int>(s & ((1u << kOpBits) - 1)); }

/// Whether `got` is at least as far as `want`, whichever operations they name. Right across the wrap of the epoch.
FLEXEP_HD constexpr bool has_reached(Signal got, Signal want) {
  return static_cast<std::int64_t>(((got >> kOpBits) << kOpBits) - ((want >> kOpBits) << kOpBits)) >= 0;
}

/// How a wait ended. Everything but `arrived` makes every role of the rank unwind, and breaks the window.
enum class Status : std::int32_t {
  arrived = 0,
  expired = 1,     // the deadline passed
  stopped = 2,     // a peer gave up and said so
  left = 3,        // the awaited peer destroyed its side of the window, and what it had posted is not enough
  mismatched = 4,  // the awaited peer is in another operation of the same epoch
  busy = 5,        // no wait: another operation runs on the window
  failed = 6,      // no wait: the rank cannot run the operation
};
constexpr const char* kStatusNames[] = {"arrived",    "expired", "stopped", "left",
                                        "mismatched", "busy",    "failed"};

}  // namespace flexep
