// The host's Mem: windows that this process has mapped, its own or those of other processes. What it promises is in
// proto/exchange.h. One object serves one lane; nothing in it is shared.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "mem/moved.h"
#include "proto/exchange.h"

namespace flexep {

class HostMem {
 public:
  /// `windows`: address of every rank's window, [ranks]. `state`: this rank's.
  HostMem(char* const* windows, const Topology& topology, int rank, WindowState& state)
      : windows_(windows), topology_(topology), rank_(rank), state_(state) {}

  void put(int to, std::size_t at, const void* from, std::size_t bytes) {
    std::memcpy(windows_[to] + at, from, bytes);
    count(to, bytes);
  }
  const void* view(int from, std::size_t at, std::size_t bytes) {
    count(from, bytes);
    return windows_[from] + at;
  }
  /// Where this lane may write such bytes itself, as a put would, until its next drain.
  void* target(int to, std::size_t at, std::size_t bytes) {
    count(to, bytes);
    return windows_[to] + at;
  }
  void drain() {}  // a put is a plain store: the post that follows orders it
  void post(int to, std::size_t at, Signal signal);
  void put_then_post(int to, std::size_t at, const void* from, std::size_t bytes, std::size_t word_at,
                     Signal signal) {
    std::memcpy(windows_[to] + at, from, bytes);
    post(to, word_at, signal);
  }
  Signal load(std::size_t at) const;
  /// Spins a moment, then sleeps on the word: another process's post wakes it.
  Idle idle(std::size_t at, Signal seen, Clock& clock) const;
  bool stop_once();

  const Moved& moved() const { return moved_; }

 private:
  void count(int peer, std::size_t bytes) {
    if (peer == rank_) return;
    const auto n = static_cast<std::int64_t>(bytes);
    moved_.add({1, n, 0, 0});
    if (topology_.domain(peer) != topology_.domain(rank_)) moved_.add({0, 0, 1, n});
  }

  char* const* windows_;
  Topology topology_;
  int rank_;
  WindowState& state_;
  Moved moved_;
};

/// Takes the window for one operation and returns true; false if another operation has it.
bool enter(WindowState& state);
void leave(WindowState& state);
bool has_stopped(const WindowState& state);

}  // namespace flexep
