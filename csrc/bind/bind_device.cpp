#include <pybind11/stl.h>

#include <optional>

#include "bind/bind.h"
#include "kernels/device_ahead.h"

namespace flexep {

namespace py = pybind11;

void bind_device(py::module_& m) {
  py::class_<DeviceWorld>(m, "DeviceWorld")
      .def(py::init([](const WindowShape& shape, int first_rank, int hosted, Address windows, Address states,
                       Address reports, Address moved) {
             return DeviceWorld{shape, first_rank, hosted, windows, states, reports, moved};
           }),
           py::kw_only(), py::arg("shape"), py::arg("first_rank"), py::arg("hosted"), py::arg("windows"),
           py::arg("states"), py::arg("reports"), py::arg("moved"));
  m.attr("MAX_DEVICE_RANKS") = kMaxDeviceRanks;
  m.attr("MAX_DEVICE_SLICES") = kMaxDeviceSlices;
  m.attr("MAX_DEVICE_OPS") = kMaxDeviceOps;
  m.def("device_state_bytes", &device_state_bytes, py::arg("shape"), py::arg("hosted"));
  m.def("device_report_bytes", &device_report_bytes, py::arg("hosted"));
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  const auto with_arguments = [&](const char* name, auto* launch) {
    m.def(name, launch, unlocked, py::arg("world"), py::arg("args"), py::arg("op"), py::arg("seconds"),
          py::arg("stream"));
  };
  with_arguments("device_publish", &launch_publish);
  with_arguments("device_exchange_records", &launch_records);
  with_arguments("device_deliver", &launch_deliver);
  with_arguments("device_collect", &launch_collect);
  m.attr("AHEAD_SMS") = kAheadSms;
  py::class_<AheadArgs>(m, "AheadArgs")
      .def(py::init([](Address x, int tokens) { return AheadArgs{at<void>(x), tokens}; }), py::arg("x"),
           py::arg("tokens"));
  py::class_<SendAhead>(m, "SendAhead")
      .def(py::init<const DeviceWorld&, const std::vector<Address>&>(), py::arg("world"), py::arg("windows"))
      .def("start", &SendAhead::start, unlocked, py::arg("args"), py::arg("op"), py::arg("seconds"),
           py::arg("stream"))
      .def("join", &SendAhead::join, unlocked, py::arg("stream"));
  m.def("device_leave", &launch_leave, unlocked, py::arg("world"), py::arg("stream"));
  m.def(
      "device_fault",
      [](const DeviceWorld& world) -> std::optional<FaultRecord> {
        FaultRecord fault;
        for (int hosted = 0; hosted < world.hosted; ++hosted)
          if (read_report(world, hosted, fault)) return fault;
        return std::nullopt;
      },
      py::arg("world"), "The first failure that a hosted rank has reported.");
}

}  // namespace flexep
