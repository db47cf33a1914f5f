// The device's Mem and Team where a lane of a role is a whole warp: rows go by ordinary 16-byte loads and stores. All
// threads of a warp call together and get the same answers.
#pragma once
#include <cstddef>
#include <cstdint>

#include "mem/cuda.cuh"
#include "mem/moved.h"

namespace flexep {

/// The warps of a CTA as the lanes of a team. `said` is a word of shared memory.
class CtaWarps {
 public:
  __device__ explicit CtaWarps(int* said) : said_(said) {}

  __device__ int rank() const { return static_cast<int>(threadIdx.x) / 32; }
  __device__ int size() const { return static_cast<int>(blockDim.x) / 32; }
  __device__ void sync() const { __syncthreads(); }
  __device__ int broadcast(int value) const {
    if (threadIdx.x == 0) *said_ = value;
    sync();
    const int said = *said_;
    sync();
    return said;
  }

 private:
  int* said_;
};

/// A warp as a team of one lane, for the warps of a crew that wait or post.
struct OneWarp {
  __device__ int rank() const { return 0; }
  __device__ int size() const { return 1; }
  __device__ void sync() const { __syncwarp(); }
  __device__ int broadcast(int value) const {
    sync();
    return value;
  }
};

/// A warp of those of a crew that move.
struct MoverWarp : Lane {};

/// What the warps of a crew tell each other (proto/crew.h), in shared memory.
class CrewCounts {
 public:
  static constexpr int kMaxMovers = 16;

  /// By one thread, before anybody looks.
  __device__ void clear() {
    granted_.set(0);
    for (CtaCount& moved : moved_) moved.set(0);
  }
  __device__ void set_granted(int steps) { set(granted_, steps); }
  __device__ int granted() const { return get(granted_); }
  __device__ void set_moved(int mover, int steps) { set(moved_[mover], steps); }
  __device__ int moved(int mover) const { return get(moved_[mover]); }
  __device__ void pause() const { __nanosleep(kPauseNanoseconds); }

 private:
  __device__ static void set(CtaCount& count, int value) {
    __syncwarp();  // the other threads' accesses come before lane 0's release
    if (threadIdx.x % 32 == 0) count.set(value);
  }
  __device__ static int get(const CtaCount& count) {
    int value = 0;
    if (threadIdx.x % 32 == 0) value = count.get();
    value = __shfl_sync(0xffffffffu, value, 0);
    __syncwarp();  // a shuffle orders no memory
    return value;
  }
  static constexpr unsigned kPauseNanoseconds = 40;

  CtaCount granted_, moved_[kMaxMovers];
};

/// What a rank keeps beside its window, in its GPU's memory, zeroed at first. Followed by last_used.
struct DeviceState {
  static constexpr int kMaxCtas = 256;

  WindowState window;
  std::uint32_t running[kMaxCtas] = {};  // 1 while that CTA of an operation runs
  std::uint32_t ended = 0;               // CTAs of this operation that have ended
  Epoch ahead = 0;                       // of the delivery whose rows are sent ahead, as its words say it
};

/// Where the host looks for a rank's failure: memory that both see.
struct DeviceReport {
  FaultRecord fault;
  std::uint32_t failed = 0;  // written last
};

class WarpMem {
 public:
  __device__ WarpMem(char* const* windows, const Topology& topology, int rank, DeviceState& state)
      : mem_(windows, 0, rank, state.window),
        rank_(rank),
        domain_begin_(topology.domain(rank) * topology.domain_size),
        domain_size_(topology.domain_size) {}

  __device__ void put(int to, std::size_t at, const void* from, std::size_t bytes) {
    copy(target(to, at, bytes), from, bytes);
  }
  __device__ const void* view(int from, std::size_t at, std::size_t bytes) {
    count(from, bytes);
    return mem_.view(from, at, bytes);
  }
  /// Where this warp may write such bytes itself, as a put would, until its next drain.
  __device__ void* target(int to, std::size_t at, std::size_t bytes) {
    count(to, bytes);
    return mem_.address(to, at);
  }
  /// The same for a lane by itself: its warp counts rows by `count_rows`.
  __device__ char* address(int rank, std::size_t at) const { return mem_.address(rank, at); }
  __device__ void count_rows(int peer, int rows, std::int64_t row_bytes) {
    count(peer, rows, rows * row_bytes);
  }
  __device__ void drain() const {}  // ordinary stores: the post that follows orders them
  __device__ void post(int to, std::size_t at, Signal signal) const {
    __syncwarp();  // orders the other threads' accesses before lane 0's release
    if (lane() == 0) mem_.post(to, at, signal);
  }
  __device__ void put_then_post(int to, std::size_t at, const void* from, std::size_t bytes,
                                std::size_t word_at, Signal signal) const {
    if (lane() == 0) mem_.put_then_post(to, at, from, bytes, word_at, signal);
    __syncwarp();
  }
  __device__ Signal load(std::size_t at) const {
    Signal signal = 0;
    if (lane() == 0) signal = mem_.load(at);
    signal = __shfl_sync(0xffffffffu, signal, 0);
    __syncwarp();  // a shuffle orders no memory
    return signal;
  }
  __device__ Idle idle(std::size_t at, Signal seen, Clock& clock) const {
    int next = 0;
    if (lane() == 0) next = static_cast<int>(mem_.idle(at, seen, clock));
    return static_cast<Idle>(__shfl_sync(0xffffffffu, next, 0));
  }
  __device__ bool stop_once() const {
    int first = 0;
    if (lane() == 0) first = mem_.stop_once();
    return __shfl_sync(0xffffffffu, first, 0) != 0;
  }

  /// `bytes` by the warp, 16 at a time where both ends allow it, else 4.
  __device__ static void copy(void* to, const void* from, std::size_t bytes) {
    const auto both = reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from) | bytes;
    if (both % 16 == 0)
      copy_as<uint4>(to, from, bytes);
    else
      copy_as<std::uint32_t>(to, from, bytes);
  }
  __device__ const Moved& moved() const { return moved_; }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  template <class T>
  __device__ static void copy_as(void* to, const void* from, std::size_t bytes) {
    constexpr int kAtOnce = 8;  // loads in flight
    const auto count = static_cast<int>(bytes / sizeof(T));
    for (int first = lane(); first < count; first += 32 * kAtOnce) {
      T some[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (first + 32 * i < count) some[i] = static_cast<const T*>(from)[first + 32 * i];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (first + 32 * i < count) static_cast<T*>(to)[first + 32 * i] = some[i];
    }
  }
  __device__ void count(int peer, std::size_t bytes) { count(peer, 1, static_cast<std::int64_t>(bytes)); }
  __device__ void count(int peer, int rows, std::int64_t bytes) {
    if (peer == rank_) return;
    moved_.add({rows, bytes, 0, 0});
    const bool near = peer >= domain_begin_ && peer < domain_begin_ + domain_size_;
    if (!near) moved_.add({0, 0, rows, bytes});
  }

  CudaMem mem_;
  int rank_, domain_begin_, domain_size_;
  Moved moved_;
};

/// First thing of a rank's CTA: false if that CTA of another operation still runs.
__device__ inline bool begin_cta(DeviceState& state, int cta, int* said) {
  if (threadIdx.x == 0) *said = ptx::exchange_relaxed_gpu(&state.running[cta], 1) == 0;
  __syncthreads();
  const bool free = *said != 0;
  __syncthreads();
  return free;
}

/// Whether a rank has stopped. By all threads of a CTA, alike on all, though the word may change while they look.
__device__ inline bool cta_sees_stop(const WindowState& window) {
  return __syncthreads_or(static_cast<const volatile WindowState&>(window).stopped != 0) != 0;
}

/// Adds what the warps of a CTA have moved in an operation.
__device__ inline void add_moved(const Moved& moved, Moved& total) {
  if (threadIdx.x % 32 != 0) return;
  auto* const counters = reinterpret_cast<unsigned long long*>(&total);
  const std::int64_t mine[] = {moved.rows, moved.bytes, moved.rail_rows, moved.rail_bytes};
  for (int i = 0; i < 4; ++i)
    if (mine[i] != 0) atomicAdd(counters + i, static_cast<unsigned long long>(mine[i]));
}

/// Last thing of a CTA; returns true on thread 0 of the rank's last one to end. That thread then owns the state until
/// the kernel ends.
__device__ inline bool end_cta(DeviceState& state, int cta, int ctas) {
  __syncthreads();
  if (threadIdx.x != 0) return false;
  ptx::exchange_relaxed_gpu(&state.running[cta], 0);
  __threadfence();
  const bool last = atomicAdd(&state.ended, 1u) + 1 == static_cast<unsigned>(ctas);
  __threadfence();
  if (last) state.ended = 0;
  return last;
}

/// Makes a failure visible to the host.
__device__ inline void report_failure(DeviceReport& report, const FaultRecord& fault) {
  report.fault = fault;
  __threadfence_system();
  *static_cast<volatile std::uint32_t*>(&report.failed) = 1;
}

}  // namespace flexep
