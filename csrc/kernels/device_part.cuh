// What the kernels of device_exec.cu and device_plan.cu share: the windows as a launch knows them, one CTA's part of an
// operation on them, the operations that CTAs play as one team, and the launch itself.
#pragma once
#include <cstddef>
#include <cstdint>
#include <new>
#include <string>
#include <type_traits>
#include <vector>

#include "base/cuda_check.h"
#include "base/error.h"
#include "kernels/device_exec.h"
#include "kernels/records.h"
#include "mem/cuda_warps.cuh"

namespace flexep {

/// A DeviceWorld for a kernel.
struct LaunchedWorld {
  WindowLayout layout;
  int first_rank;
  char* const* windows;
  DeviceState* states;
  Epoch* last_used;  // [hosted][slices][kChannels][ranks]
  DeviceReport* reports;
  Moved* moved;    // [hosted][kMaxDeviceOps]
  double seconds;  // of every wait
};

inline LaunchedWorld launched_world(const DeviceWorld& world, double seconds) {
  const WindowShape& shape = world.shape;
  if (world.hosted > kMaxDeviceRanks)
    throw Error(std::to_string(world.hosted) + " ranks on one GPU: at most " +
                std::to_string(kMaxDeviceRanks));
  if (shape.slices > kMaxDeviceSlices)
    throw Error(std::to_string(shape.slices) + " slices: at most " + std::to_string(kMaxDeviceSlices));
  auto* const states = reinterpret_cast<DeviceState*>(world.states);
  return {WindowLayout(shape),
          world.first_rank,
          reinterpret_cast<char* const*>(world.windows),
          states,
          reinterpret_cast<Epoch*>(states + world.hosted),
          reinterpret_cast<DeviceReport*>(world.reports),
          reinterpret_cast<Moved*>(world.moved),
          seconds};
}

inline int checked_op(int op) {
  if (op >= kMaxDeviceOps) throw Error("operation " + std::to_string(op) + ": too large a number");
  return op;
}

/// What all warps of a CTA look up again and again, in shared memory: global memory's first cache is emptied by every
/// acquire.
struct CtaTables {
  alignas(WindowLayout) char layout[sizeof(WindowLayout)];
  char* windows[kMaxDeviceRanks];
};

/// A CTA of those that play an operation of a hosted rank, `count` of them.
struct CtaOfRank {
  int hosted, number, count;
  __device__ static CtaOfRank of_grid(int ctas) {
    return {static_cast<int>(blockIdx.x) / ctas, static_cast<int>(blockIdx.x) % ctas, ctas};
  }
};

/// One CTA's part of the operations of a kernel: whose they are, and of which slice. Its tables are there once it has
/// begun.
class CtaPart {
 public:
  __device__ CtaPart(const LaunchedWorld& world, CtaTables& tables, const CtaOfRank& cta, int slice)
      : world_(world),
        tables_(tables),
        cta_(cta),
        rank_(world.first_rank + cta.hosted),
        state_(world.states[cta.hosted]),
        before_(state_.window),  // read before the rank's last CTA to end changes it
        mem_(tables.windows, world.layout.shape.topology, rank_, state_) {
    for (int rank = static_cast<int>(threadIdx.x); rank < world.layout.shape.topology.ranks;
         rank += static_cast<int>(blockDim.x))
      tables.windows[rank] = world.windows[rank];
    if (threadIdx.x == blockDim.x - 1) new (tables.layout) WindowLayout(world.layout.of_slice(slice));
  }

  __device__ const WindowLayout& layout() const {
    return *reinterpret_cast<const WindowLayout*>(tables_.layout);
  }
  __device__ int cta() const { return cta_.number; }
  __device__ int page() const { return static_cast<int>((before_.boards + boards_) % 2); }
  __device__ const WarpMem& mem() const { return mem_; }
  /// The next operation, for those that play it.
  __device__ Operation operation(int op) const {
    return {rank_, before_.epoch + operations_ + 1, op, last_used(layout().slice), world_.seconds};
  }
  /// A delivery of rows that were sent ahead: its words have the epoch that `note_ahead` has noted.
  __device__ Operation operation_ahead(int op) const {
    Operation of = operation(op);
    of.epoch = state_.ahead;
    return of;
  }

  /// Once, by all threads: whether this CTA may do anything. Not on a rank that has stopped, whose lists may be
  /// undefined; if this CTA of another kernel still runs, the rank stops.
  __device__ bool begin(int op) {
    __shared__ int said;
    if (begin_cta(state_, cta_.number, &said)) return __syncthreads_or(before_.stopped != 0) == 0;
    if (threadIdx.x < 32) {
      OneWarp one;
      const Operation refused = operation(op);
      Exchange<WarpMem, OneWarp>(mem_, one, layout(), refused).refuse(Status::busy);
    }
    return false;
  }
  /// Waits until all peers have read what this rank's last delivery has offered, or sent ahead, in any slice.
  __device__ void await_idle_lines(int op) {
    const WindowLayout& all = layout();  // of slice 0
    const int R = all.shape.topology.ranks, lines = all.shape.slices * R;
    bool late = false;
    for (int i = static_cast<int>(threadIdx.x); i < lines; i += static_cast<int>(blockDim.x)) {
      const int slice = i / R, line = static_cast<int>(Channel::pull) * R + i % R;
      const Epoch last = last_used(slice)[line];
      const std::size_t word = all.slice_word(free_word(Channel::pull), slice, i % R);
      late |= last != 0 && !has_reached(CudaMem(tables_.windows, 0, rank_, state_.window).load(word),
                                        all_given_back(last, op));
    }
    if (__syncthreads_or(late) == 0) return;
    OneWarp one;
    for (int slice = static_cast<int>(threadIdx.x) / 32; slice < all.shape.slices;
         slice += static_cast<int>(blockDim.x) / 32) {
      const WindowLayout mine = all.of_slice(slice);
      Operation of = operation(op);
      of.last_used = last_used(slice);
      Exchange<WarpMem, OneWarp> exchange(mem_, one, mine, of);
      for (int step = 1; step < R; ++step)
        if (exchange.emptied_before(Channel::pull, Topology::direct(rank_, (rank_ + step) % R)) !=
            Status::arrived)
          return;
    }
  }
  /// The next operation's epoch is that of rows sent ahead from here on, on every rank that delivers them.
  __device__ void note_ahead() {
    if (threadIdx.x == 0) state_.ahead = before_.epoch + operations_ + 1;
  }
  /// Stops if a peer has given up by now: it may have sent rows over those that were read. By all threads, once they
  /// have read.
  __device__ void heed(int op) {
    __syncthreads();
    if (threadIdx.x >= 32) return;
    OneWarp one;
    const Operation of = operation(op);
    Exchange<WarpMem, OneWarp>(mem_, one, layout(), of).heed();
  }
  /// Whether the rank has stopped, as far as this CTA sees. By all threads, alike on all.
  __device__ bool stopped() const { return cta_sees_stop(state_.window); }
  __device__ void count(const Moved& moved, int op) {
    add_moved(moved, world_.moved[cta_.hosted * kMaxDeviceOps + op]);
  }
  /// Every CTA counts every operation, also one that it has no part in.
  __device__ void pass(bool publishes) { ++operations_, boards_ += publishes; }
  /// Once, behind the last operation.
  __device__ void end() {
    if (!end_cta(state_, cta_.number, cta_.count)) return;
    state_.window.epoch = before_.epoch + operations_;
    state_.window.boards = before_.boards + boards_;
    if (state_.window.stopped)
      report_failure(world_.reports[cta_.hosted],
                     *reinterpret_cast<const FaultRecord*>(
                         world_.windows[rank_] + layout().faults.of(static_cast<std::size_t>(rank_))));
  }

  /// A kernel's only operation: work() -> Moved, by all threads.
  template <class Work>
  __device__ void run(int op, bool publishes, const Work& work) {
    if (begin(op)) count(work(), op);
    pass(publishes);
    end();
  }

 private:
  __device__ Epoch* last_used(int slice) const {
    const WindowShape& shape = layout().shape;
    const std::int64_t lines = static_cast<std::int64_t>(kChannels) * shape.topology.ranks;
    return world_.last_used + (cta_.hosted * shape.slices + slice) * lines;
  }

  const LaunchedWorld& world_;
  const CtaTables& tables_;
  const CtaOfRank cta_;
  const int rank_;
  DeviceState& state_;
  const WindowState before_;
  Epoch operations_ = 0;
  std::uint32_t boards_ = 0;
  WarpMem mem_;
};

struct CopyBytes {
  __device__ void operator()(void* to, const void* from, std::size_t bytes) const {
    WarpMem::copy(to, from, bytes);
  }
};

/// What teams play, by CTA of a rank. Integers: one CTA. Records: two a slice, one that takes and one that sends.
struct PublishTeams {
  using Args = PublishArgs;
  static constexpr bool kPublishes = true;
  FLEXEP_HD static int ctas(const WindowShape&) { return 1; }
  FLEXEP_HD static int slice(int) { return 0; }
  template <class Exchange>
  __device__ static void run(int, Exchange& exchange, const Args& args, int page) {
    publish_ints(exchange, page, args, CopyBytes{});
  }
};
struct RecordTeams {
  using Args = RecordArgs;
  static constexpr bool kPublishes = false;
  FLEXEP_HD static int ctas(const WindowShape& shape) { return 2 * shape.mail_slices(); }
  FLEXEP_HD static int slice(int cta) { return cta / 2; }
  template <class Exchange>
  __device__ static void run(int cta, Exchange& exchange, const Args& args, int) {
    if (cta % 2 == 0)
      take_records(exchange, args, CopyBytes{});
    else
      send_records(exchange, args);
  }
};

/// What such a part does in the next operation, and what it has moved. `said`: a word of shared memory.
template <class Teams>
__device__ Moved play(CtaPart& part, int op, int* said, const typename Teams::Args& args) {
  WarpMem mem = part.mem();
  CtaWarps team(said);
  Exchange<WarpMem, CtaWarps> exchange(mem, team, part.layout(), part.operation(op));
  Teams::run(part.cta(), exchange, args, part.page());
  return mem.moved();
}

/// A launch carries one item for each hosted rank.
template <class Item>
const std::vector<Item>& one_each(const DeviceWorld& world, const std::vector<Item>& items) {
  if (static_cast<int>(items.size()) != world.hosted)
    throw Error(std::to_string(items.size()) + " items for " + std::to_string(world.hosted) +
                " hosted ranks");
  return items;
}

/// Calls launch(n), a constant: of how many ranks a launch has room for arguments. Those of all that may be hosted are
/// up to 20 KB, which cost the host 3 us a launch (docs/decisions/crews.md), so a single rank has kernels of its own.
template <class F>
void with_room(int hosted, const F& launch) {
  if (hosted == 1)
    launch(std::integral_constant<int, 1>{});
  else
    launch(std::integral_constant<int, kMaxDeviceRanks>{});
}

/// Launches `ctas` CTAs for each hosted rank, all of which are there at once.
template <class Launch>
void start(void (*kernel)(Launch), const Launch& launch, int hosted, int ctas, int threads,
           std::size_t shared, std::uintptr_t stream) {
  if (ctas > DeviceState::kMaxCtas)
    throw Error(std::to_string(ctas) + " CTAs of a rank: at most " + std::to_string(DeviceState::kMaxCtas));
  void* params[] = {const_cast<Launch*>(&launch)};  // is read alone
  const auto* const function = reinterpret_cast<const void*>(kernel);
  constexpr std::size_t kWithoutAsking = 48 * 1024;
  if (shared > kWithoutAsking)
    cuda_check(
        cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)),
        "shared memory of a one-sided launch");
  const cudaError_t error = cudaLaunchCooperativeKernel(function, dim3(hosted * ctas), dim3(threads), params,
                                                        shared, reinterpret_cast<cudaStream_t>(stream));
  if (error == cudaErrorCooperativeLaunchTooLarge)
    throw Error(std::to_string(hosted) + " ranks need " + std::to_string(hosted * ctas) +
                " CTAs at once, more than this GPU holds");
  cuda_check(error, "one-sided launch");
}

}  // namespace flexep
