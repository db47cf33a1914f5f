// Stands in for device_exec.cu, device_plan.cu and device_ahead.cu in a build without nvcc: every entry raises with the
// option to set.
#if !defined(FLEXEP_WITH_CUDA)
#include "base/error.h"
#include "kernels/device_ahead.h"
#include "kernels/one_sided_plan.h"

namespace flexep {
namespace {

[[noreturn]] void refuse() {
  throw NotBuilt("windows on a GPU are not in this build; build with nvcc on PATH and -DFLEXEP_CUDA=ON");
}

}  // namespace

std::int64_t device_state_bytes(const WindowShape&, int) { refuse(); }
std::int64_t device_report_bytes(int) { refuse(); }
void launch_publish(const DeviceWorld&, const std::vector<PublishArgs>&, int, double, std::uintptr_t) {
  refuse();
}
void launch_records(const DeviceWorld&, const std::vector<RecordArgs>&, int, double, std::uintptr_t) {
  refuse();
}
void launch_deliver(const DeviceWorld&, const std::vector<DeliverArgs>&, int, double, std::uintptr_t) {
  refuse();
}
void launch_collect(const DeviceWorld&, const std::vector<CollectArgs>&, int, double, std::uintptr_t) {
  refuse();
}
void launch_leave(const DeviceWorld&, std::uintptr_t) { refuse(); }
void count_on_device(const DeviceWorld&, const SlotsToCount&, double, std::uintptr_t) { refuse(); }
void plan_on_device(const DeviceWorld&, const std::vector<OneSidedPlan>&, const PlanMessages&,
                    std::uintptr_t) {
  refuse();
}
void count_and_plan_on_device(const DeviceWorld&, const SlotsToCount&, const std::vector<OneSidedPlan>&,
                              const PlanMessages&, std::uintptr_t) {
  refuse();
}
class SendAhead::Streams {};
SendAhead::SendAhead(const DeviceWorld&, const std::vector<std::uintptr_t>&) { refuse(); }
SendAhead::~SendAhead() = default;
void SendAhead::start(const std::vector<AheadArgs>&, int, double, std::uintptr_t) { refuse(); }
void SendAhead::join(std::uintptr_t) { refuse(); }
bool read_report(const DeviceWorld&, int, FaultRecord&) { refuse(); }

}  // namespace flexep
#endif
