// Runs operations of a window on the CPU: the roles of every rank that this process plays, a thread each.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "kernels/args.h"
#include "mem/host.h"

namespace flexep {

/// Another operation runs on the window.
struct WindowBusy : Error {
  using Error::Error;
};

/// An earlier operation failed, or this rank has left.
struct WindowBroken : Error {
  using Error::Error;
};

/// What one operation did on one rank.
struct Report {
  Status status = Status::arrived;
  FaultRecord fault;  // if status is not `arrived`
  Moved moved;
};

/// The windows of all ranks as this process can address them, and the state of the ranks that it plays. Operations are
/// collective: every rank runs the same ones in the same order, one at a time (WindowBusy), and none after one that
/// failed (WindowBroken). The memory belongs to the caller and outlives this object.
class HostWindows {
 public:
  /// `windows`: address of each rank's zeroed memory, WindowLayout(shape).bytes long. `hosted`: ranks played here.
  HostWindows(const WindowShape& shape, const std::vector<std::uintptr_t>& windows,
              const std::vector<int>& hosted);
  ~HostWindows();

  // Every call takes one `args` for each hosted rank and a number of the operation below 256, equal on all ranks.
  // `seconds` bounds each wait, `lanes` is how many threads a role that moves rows may use.
  std::vector<Report> publish(const std::vector<PublishArgs>& args, int op, double seconds);
  std::vector<Report> exchange_records(const std::vector<RecordArgs>& args, int op, double seconds);
  std::vector<Report> deliver(const std::vector<DeliverArgs>& args, int op, double seconds, int lanes);
  std::vector<Report> collect(const std::vector<CollectArgs>& args, int op, double seconds, int lanes);

  /// Tells peers that nothing more will come from here; they fail only where they wait for something that has not come.
  void leave();
  /// Operations begun.
  Epoch epoch() const;

 private:
  class Run;
  struct Rank;

  WindowLayout layout_;
  std::vector<char*> windows_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace flexep
