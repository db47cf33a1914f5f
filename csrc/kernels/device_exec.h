// Runs operations of windows in GPU memory, for the ranks that live on this GPU (one, or all of them): a cooperative
// launch each, where those of a plan share theirs with its steps (one_sided_plan.h). The launch guarantees that its CTAs
// are there at once; beyond that ranks meet through the exchange alone, as on any other machine. Nothing here waits for
// the GPU, and a captured graph can hold these calls.
//
// A CTA serves one slice of one rank. Rows are moved by crews, its warps that wait, move and post (device_crews.cuh);
// integers and records by the CTA as one team, records by two CTAs a slice, in the first slices alone.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels/args.h"
#include "proto/window.h"

namespace flexep {

/// Ranks that one launch can carry the arguments of, and slices of a window on a GPU.
constexpr int kMaxDeviceRanks = 128;
constexpr int kMaxDeviceSlices = 128;
/// Numbers of operations that are counted.
constexpr int kMaxDeviceOps = 16;

/// Memory of the ranks [first_rank, first_rank + hosted) that live on this GPU, all zeroed by its owner before the
/// first operation and alive until the last has ended.
struct DeviceWorld {
  WindowShape shape;
  int first_rank, hosted;
  std::uintptr_t windows;  // [ranks] addresses of all windows as this GPU maps them, on the GPU
  std::uintptr_t states;   // device_state_bytes(shape, hosted), on the GPU
  std::uintptr_t reports;  // device_report_bytes(hosted), seen by host and GPU
  std::uintptr_t moved;    // int64 [hosted][kMaxDeviceOps][4], on the GPU: Moved, by operation, so far
};

std::int64_t device_state_bytes(const WindowShape& shape, int hosted);
std::int64_t device_report_bytes(int hosted);

// One `args` for each hosted rank; pointers in them are the GPU's. Throw NotBuilt without a CUDA side, Error when the
// launch is refused, which names the ranks and CTAs if they do not fit on the GPU at once.
void launch_publish(const DeviceWorld& world, const std::vector<PublishArgs>& args, int op, double seconds,
                    std::uintptr_t stream);
void launch_records(const DeviceWorld& world, const std::vector<RecordArgs>& args, int op, double seconds,
                    std::uintptr_t stream);
void launch_deliver(const DeviceWorld& world, const std::vector<DeliverArgs>& args, int op, double seconds,
                    std::uintptr_t stream);
void launch_collect(const DeviceWorld& world, const std::vector<CollectArgs>& args, int op, double seconds,
                    std::uintptr_t stream);

/// Tells every peer that nothing more comes from the hosted ranks, behind what the stream holds: whoever waits for one
/// of them need not wait for its deadline. Ranks that have given up have said so already. Throws as the others do.
void launch_leave(const DeviceWorld& world, std::uintptr_t stream);

/// Whether the i-th hosted rank has failed, read from memory that the GPU may be writing.
bool read_report(const DeviceWorld& world, int hosted, FaultRecord& fault);

}  // namespace flexep
