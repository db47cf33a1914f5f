#include "mem/host.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <ctime>

namespace flexep {
namespace {

/// A peer that runs answers within microseconds; after this many looks it is probably not running, and this thread's
/// processor may be the one it waits for.
constexpr std::uint32_t kSpins = 100;
/// The longest sleep between two looks at the stop words.
constexpr std::int64_t kNapNanoseconds = 5'000'000;

static_assert(std::atomic_ref<Signal>::is_always_lock_free);

std::atomic_ref<Signal> word_of(char* window, std::size_t at) {
  return std::atomic_ref<Signal>(*reinterpret_cast<Signal*>(window + at));
}

/// The half of a word that every post changes, which a futex can watch.
std::uint32_t* low_half(char* window, std::size_t at) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
  return reinterpret_cast<std::uint32_t*>(window + at);
}

std::int64_t now_nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

void HostMem::post(int to, std::size_t at, Signal signal) {
  word_of(windows_[to], at).store(signal, std::memory_order_release);
  syscall(SYS_futex, low_half(windows_[to], at), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

Signal HostMem::load(std::size_t at) const {
  return word_of(windows_[rank_], at).load(std::memory_order_acquire);
}

Idle HostMem::idle(std::size_t at, Signal seen, Clock& clock) const {
  if (++clock.looks <= kSpins) {
    pause();
    return Idle::again;
  }
  const std::int64_t now = now_nanoseconds();
  if (clock.began == 0) clock.began = now;
  const double left = clock.seconds * 1e9 - static_cast<double>(now - clock.began);
  if (left <= 0) return Idle::expired;
  const auto nap = static_cast<std::int64_t>(std::min(left, static_cast<double>(kNapNanoseconds)));
  const timespec limit{static_cast<time_t>(nap / 1'000'000'000), static_cast<long>(nap % 1'000'000'000)};
  // Not the private kind: the one who wakes us may be another process. A value that changed meanwhile returns at once.
  syscall(SYS_futex, low_half(windows_[rank_], at), FUTEX_WAIT, static_cast<std::uint32_t>(seen), &limit,
          nullptr, 0);
  return Idle::look_around;
}

bool HostMem::stop_once() {
  return std::atomic_ref<std::uint32_t>(state_.stopped).exchange(1, std::memory_order_acq_rel) == 0;
}

bool enter(WindowState& state) {
  return std::atomic_ref<std::uint32_t>(state.busy).exchange(1, std::memory_order_acquire) == 0;
}

void leave(WindowState& state) {
  std::atomic_ref<std::uint32_t>(state.busy).store(0, std::memory_order_release);
}

bool has_stopped(const WindowState& state) {
  return std::atomic_ref<std::uint32_t>(const_cast<WindowState&>(state).stopped)
             .load(std::memory_order_acquire) != 0;
}

}  // namespace flexep
