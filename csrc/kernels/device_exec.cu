#include "kernels/device_exec.h"

#include <cstring>
#include <string>

#include "base/cuda_check.h"
#include "base/error.h"
#include "kernels/deliver.h"
#include "kernels/device_rows.cuh"
#include "kernels/records.h"

namespace flexep {
namespace {

constexpr int kWarps = 8;  // of a CTA, which is one role of one rank

template <class Args>
struct Launch {
  WindowLayout layout;
  char* const* windows;
  DeviceState* states;
  Epoch* last_used;  // [ranks][kChannels][ranks]
  DeviceReport* reports;
  Moved* moved;  // [ranks][kMaxDeviceOps]
  int op;
  double seconds;
  Args args[kMaxDeviceRanks];
};

struct CopyBytes {
  __device__ void operator()(void* to, const void* from, std::size_t bytes) const {
    WarpMem::copy(to, from, bytes);
  }
};

/// The roles of each operation, by number. `run` returns nothing: a role that failed has stopped the window.
struct PublishRoles {
  using Args = PublishArgs;
  static constexpr bool kPublishes = true;
  static int count(const Topology&) { return 1; }
  template <class Exchange>
  __device__ static void run(int, Exchange& exchange, const Args& args, int page) {
    publish_ints(exchange, page, args, CopyBytes{});
  }
};

struct RecordRoles {
  using Args = RecordArgs;
  static constexpr bool kPublishes = false;
  static int count(const Topology&) { return 2; }
  template <class Exchange>
  __device__ static void run(int role, Exchange& exchange, const Args& args, int) {
    if (role == 0)
      take_records(exchange, args, CopyBytes{});
    else
      send_records(exchange, args);
  }
};

struct DeliverRoles {
  using Args = DeliverArgs;
  static constexpr bool kPublishes = false;
  static int count(const Topology& topology) { return topology.domains() > 1 ? 3 : 2; }
  template <class Exchange>
  __device__ static void run(int role, Exchange& exchange, const Args& args, int) {
    if (role == 0) {
      DevicePlace place(args, exchange.topology().ranks);
      place_rows(exchange, args, place);
    } else if (role == 1) {
      offer_rows(exchange, args);
    } else {
      relay_rows(exchange, args);
    }
  }
};

struct CollectRoles {
  using Args = CollectArgs;
  static constexpr bool kPublishes = false;
  static int count(const Topology& topology) { return topology.domains() > 1 ? 3 : 2; }
  template <class Exchange>
  __device__ static void run(int role, Exchange& exchange, const Args& args, int) {
    DeviceAdd add(args);
    if (role == 0)
      push_partials(exchange, args, add);
    else if (role == 1)
      add_home(exchange, args, add);
    else
      relay_partials(exchange, args, add);
  }
};

template <class Roles>
__global__ void __launch_bounds__(kWarps * 32)
    run_roles(const __grid_constant__ Launch<typename Roles::Args> launch, int roles) {
  __shared__ int said;
  const int rank = static_cast<int>(blockIdx.x) / roles, role = static_cast<int>(blockIdx.x) % roles;
  const Topology& topology = launch.layout.shape.topology;
  DeviceState& state = launch.states[rank];
  // Read before any role of the rank can end: the last one to end advances both.
  const Epoch epoch = state.window.epoch + 1;
  const int page = static_cast<int>(state.window.boards % 2);
  WarpMem mem(launch.windows, topology, rank, state);
  CtaWarps team(&said);
  const Operation operation{rank, epoch, launch.op,
                            launch.last_used + static_cast<std::int64_t>(rank) * kChannels * topology.ranks,
                            launch.seconds};
  Exchange<WarpMem, CtaWarps> exchange(mem, team, launch.layout, operation);
  if (begin_role(state, role, &said))
    Roles::run(role, exchange, launch.args[rank], page);
  else
    exchange.refuse(Status::busy);
  if (!end_role(state, role, roles, mem.moved(), launch.moved[rank * kMaxDeviceOps + launch.op])) return;
  state.window.epoch = epoch;
  if (Roles::kPublishes) ++state.window.boards;
  if (state.window.stopped)
    report_failure(launch.reports[rank],
                   *reinterpret_cast<const FaultRecord*>(
                       launch.windows[rank] + launch.layout.faults.of(static_cast<std::size_t>(rank))));
}

template <class Roles>
void launch(const DeviceWorld& world, const std::vector<typename Roles::Args>& args, int op, double seconds,
            std::uintptr_t stream) {
  const int ranks = world.shape.topology.ranks;
  if (op >= kMaxDeviceOps) throw Error("operation " + std::to_string(op) + ": too large a number");
  if (ranks > kMaxDeviceRanks)
    throw Error(std::to_string(ranks) + " ranks on one GPU: at most " + std::to_string(kMaxDeviceRanks));
  auto* const states = reinterpret_cast<DeviceState*>(world.states);
  Launch<typename Roles::Args> launch{WindowLayout(world.shape),
                                      reinterpret_cast<char* const*>(world.windows),
                                      states,
                                      reinterpret_cast<Epoch*>(states + ranks),
                                      reinterpret_cast<DeviceReport*>(world.reports),
                                      reinterpret_cast<Moved*>(world.moved),
                                      op,
                                      seconds,
                                      {}};
  std::copy(args.begin(), args.end(), launch.args);
  int roles = Roles::count(world.shape.topology);
  void* params[] = {&launch, &roles};
  const cudaError_t error =
      cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(&run_roles<Roles>), dim3(ranks * roles),
                                  dim3(kWarps * 32), params, 0, reinterpret_cast<cudaStream_t>(stream));
  if (error == cudaErrorCooperativeLaunchTooLarge)
    throw Error(std::to_string(ranks) + " ranks need " + std::to_string(ranks * roles) +
                " CTAs at once, more than this GPU holds");
  cuda_check(error, "one-sided launch");
}

}  // namespace

std::int64_t device_state_bytes(int ranks) {
  return ranks * static_cast<std::int64_t>(sizeof(DeviceState) + sizeof(Epoch) * kChannels * ranks);
}
std::int64_t device_report_bytes(int ranks) {
  return ranks * static_cast<std::int64_t>(sizeof(DeviceReport));
}

void launch_publish(const DeviceWorld& world, const std::vector<PublishArgs>& args, int op, double seconds,
                    std::uintptr_t stream) {
  launch<PublishRoles>(world, args, op, seconds, stream);
}
void launch_records(const DeviceWorld& world, const std::vector<RecordArgs>& args, int op, double seconds,
                    std::uintptr_t stream) {
  launch<RecordRoles>(world, args, op, seconds, stream);
}
void launch_deliver(const DeviceWorld& world, const std::vector<DeliverArgs>& args, int op, double seconds,
                    std::uintptr_t stream) {
  launch<DeliverRoles>(world, args, op, seconds, stream);
}
void launch_collect(const DeviceWorld& world, const std::vector<CollectArgs>& args, int op, double seconds,
                    std::uintptr_t stream) {
  launch<CollectRoles>(world, args, op, seconds, stream);
}

bool read_report(const DeviceWorld& world, int rank, FaultRecord& fault) {
  const auto& report = reinterpret_cast<const DeviceReport*>(world.reports)[rank];
  if (*static_cast<const volatile std::uint32_t*>(&report.failed) == 0) return false;
  std::memcpy(&fault, &report.fault, sizeof fault);
  return true;
}

}  // namespace flexep
