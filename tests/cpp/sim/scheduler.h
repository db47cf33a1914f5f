// A seeded scheduler of fibers in one thread. Whoever calls yield() may lose the processor to any fiber that can run; a
// seed fixes every choice. A run in which nothing can go on, or that finds no end, fails by name.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace flexep::sim {

/// splitmix64: a fair hash of its argument.
inline std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}
template <class... Rest>
std::uint64_t mix(std::uint64_t first, Rest... rest) {
  return mix(first ^ mix(static_cast<std::uint64_t>(rest)...));
}

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(mix(seed)) {}
  /// A number in [0, n).
  int below(int n) {
    state_ += 0x9e3779b97f4a7c15u;
    return static_cast<int>((mix(state_) >> 32) * static_cast<std::uint64_t>(n) >> 32);
  }
  bool one_in(int n) { return below(n) == 0; }

 private:
  std::uint64_t state_;
};

class Scheduler {
 public:
  struct Unwind {};  // thrown through a fiber that will not go on

  explicit Scheduler(Random& random) : random_(random), stay_of_8_(random.below(3) * 3) {}

  int spawn(std::function<void()> body) {
    fibers_.push_back({});
    fibers_.back().body = std::move(body);
    fibers_.back().slow = random_.one_in(6);
    return static_cast<int>(fibers_.size()) - 1;
  }

  /// Runs all fibers to their end; returns the name of what went wrong, or nothing.
  std::string run() {
    running_ = this;
    for (int i = 0; i < static_cast<int>(fibers_.size()); ++i) prepare(fibers_[i], stack(i)), wake(i);
    return play();
  }

  int current() const { return current_; }

  /// A point at which any other fiber may go on instead.
  void yield() {
    if (++steps_ > kMostSteps) fail("no end");
    if (steps_ == alarm_) ring_();
    if (fibers_[current_].killed) throw Unwind{};
    const int next = pick();
    if (next != current_) switch_to(next);
  }
  /// Sleeps until wake(). `stuck` is asked when nothing can run: it wakes somebody, or the run fails.
  void block() {
    retire(current_);
    suspend();
  }
  void wake(int fiber) {
    if (fibers_[fiber].place >= 0 || fibers_[fiber].over || fibers_[fiber].killed) return;
    fibers_[fiber].place = static_cast<int>(ready_.size());
    ready_.push_back(fiber);
  }
  /// The fiber never runs again. If it is the current one, it stops at its next yield or block.
  void kill(int fiber) {
    fibers_[fiber].killed = true;
    retire(fiber);
  }
  void ring_at(std::int64_t step, std::function<void()> ring) { alarm_ = step, ring_ = std::move(ring); }

  [[noreturn]] void fail(const std::string& name) {
    if (failure_.empty()) failure_ = name;
    throw Unwind{};
  }

  std::function<bool()> stuck;

 private:
  struct Fiber {
    std::function<void()> body;
    ucontext_t context;
    jmp_buf at;
    int place = -1;  // in ready_
    bool started = false, over = false, killed = false, slow = false;
  };
  static constexpr std::size_t kStackBytes = 1 << 17;
  static constexpr std::int64_t kMostSteps = 100'000;

  std::string play() {
    if (_setjmp(home_) == 0) {
      current_ = pick();
      resume(current_);
    }
    return failure_;
  }
  static void prepare(Fiber& fiber, char* stack) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stack;
    fiber.context.uc_stack.ss_size = kStackBytes;
    makecontext(&fiber.context, &Scheduler::enter, 0);
  }

  static char* stack(std::size_t i) {
    static std::vector<std::unique_ptr<char[]>> stacks;  // kept from run to run
    while (stacks.size() <= i) stacks.push_back(std::make_unique_for_overwrite<char[]>(kStackBytes));
    return stacks[i].get();
  }

  void retire(int fiber) {
    const int place = fibers_[fiber].place;
    if (place < 0) return;
    fibers_[ready_.back()].place = place;
    ready_[place] = ready_.back();
    ready_.pop_back();
    fibers_[fiber].place = -1;
  }

  int pick() {
    if (fibers_[current_].place >= 0 && random_.below(8) < stay_of_8_) return current_;
    const int ready = static_cast<int>(ready_.size());
    for (int tries = 0; tries < 4; ++tries) {
      const int fiber = ready_[random_.below(ready)];
      if (!fibers_[fiber].slow || random_.one_in(8)) return fiber;
    }
    return ready_[random_.below(ready)];
  }

  void suspend() {
    if (ready_.empty() && !(stuck && stuck())) fail("deadlock");
    const int next = pick();
    if (next != current_) switch_to(next);
  }

  // The first entry of a fiber needs a context, later switches only registers: swapcontext would ask the kernel for the
  // signal mask each time, which is most of a run.
  [[gnu::noinline]] void switch_to(int next) {
    const int from = current_;
    current_ = next;
    if (_setjmp(fibers_[from].at) == 0) resume(next);
    if (unwinding_) throw Unwind{};
  }
  [[noreturn]] void resume(int fiber) {
    if (fibers_[fiber].started) _longjmp(fibers_[fiber].at, 1);
    fibers_[fiber].started = true;
    setcontext(&fibers_[fiber].context);
    __builtin_unreachable();
  }

  static void enter() {
    Scheduler& self = *running_;
    try {
      self.fibers_[self.current_].body();
    } catch (const Unwind&) {
    }
    self.leave();
  }
  /// The current fiber is over: another goes on, or the rest is unwound, or the run is.
  [[noreturn]] void leave() {
    fibers_[current_].over = true;
    retire(current_);
    if (!unwinding_ && failure_.empty()) {
      if (ready_.empty() && blocked() && !(stuck && stuck())) failure_ = "deadlock";
      if (!ready_.empty()) {
        current_ = pick();
        resume(current_);
      }
    }
    unwinding_ = true;
    for (std::size_t i = 0; i < fibers_.size(); ++i) {
      if (fibers_[i].over || !fibers_[i].started) continue;
      current_ = static_cast<int>(i);
      resume(current_);
    }
    _longjmp(home_, 1);
  }
  bool blocked() const {
    for (const Fiber& fiber : fibers_)
      if (!fiber.over && !fiber.killed) return true;
    return false;
  }

  inline static Scheduler* running_ = nullptr;

  Random& random_;
  int stay_of_8_;  // how eagerly a fiber keeps the processor: 0, 3 or 6 of 8
  std::vector<Fiber> fibers_;
  std::vector<int> ready_;
  int current_ = 0;
  bool unwinding_ = false;
  std::int64_t steps_ = 0, alarm_ = -1;
  std::function<void()> ring_;
  std::string failure_;
  jmp_buf home_;
};

}  // namespace flexep::sim
