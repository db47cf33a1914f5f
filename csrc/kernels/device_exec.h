// Runs operations of windows that live on one GPU, all ranks of them: one cooperative launch an operation, a CTA for each
// role of each rank. The launch guarantees that all CTAs are there at once; beyond that ranks meet through the exchange
// alone, as on any other machine. Nothing here waits for the GPU, and a captured graph can hold these calls.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels/args.h"
#include "proto/window.h"

namespace flexep {

/// Ranks that one launch can carry the arguments of.
constexpr int kMaxDeviceRanks = 128;
/// Numbers of operations that are counted.
constexpr int kMaxDeviceOps = 16;

/// Memory of a world, all zeroed by its owner before the first operation and alive until the last has ended.
struct DeviceWorld {
  WindowShape shape;
  std::uintptr_t windows;  // [ranks] addresses of the windows, on the GPU
  std::uintptr_t states;   // device_state_bytes(ranks), on the GPU
  std::uintptr_t reports;  // device_report_bytes(ranks), seen by host and GPU
  std::uintptr_t moved;    // int64 [ranks][kMaxDeviceOps][4], on the GPU: Moved, by operation, so far
};

std::int64_t device_state_bytes(int ranks);
std::int64_t device_report_bytes(int ranks);

// One `args` for each rank; pointers in them are the GPU's. Throw NotBuilt without a CUDA side, Error when the launch is
// refused, which names the ranks and CTAs if they do not fit on the GPU at once.
void launch_publish(const DeviceWorld& world, const std::vector<PublishArgs>& args, int op, double seconds,
                    std::uintptr_t stream);
void launch_records(const DeviceWorld& world, const std::vector<RecordArgs>& args, int op, double seconds,
                    std::uintptr_t stream);
void launch_deliver(const DeviceWorld& world, const std::vector<DeliverArgs>& args, int op, double seconds,
                    std::uintptr_t stream);
void launch_collect(const DeviceWorld& world, const std::vector<CollectArgs>& args, int op, double seconds,
                    std::uintptr_t stream);

/// A rank's failure, read from memory that the GPU may be writing: {failed, fault}.
bool read_report(const DeviceWorld& world, int rank, FaultRecord& fault);

}  // namespace flexep
