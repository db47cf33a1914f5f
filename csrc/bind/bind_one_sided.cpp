#include <pybind11/stl.h>

#include <iterator>

#include "bind/bind.h"
#include "kernels/one_sided_plan.h"

namespace flexep {
namespace {

namespace py = pybind11;

/// Of one rank with so many tokens, in no memory yet.
OneSidedPlan plan(const OneSidedSetup& setup, int rank, int first_place, int places, int tokens,
                  bool has_weights, int left, int received, int rows) {
  OneSidedInput in{};
  in.rank = rank, in.first_place = first_place, in.places = places, in.tokens = tokens;
  in.has_weights = has_weights;
  in.left = left, in.received = received, in.rows = rows;
  return {setup, in};
}

OneSidedPlan in_memory(OneSidedPlan plan, const CountSlots& counted, Address weights, Address said,
                       Address kept, Address scratch, Address arrived_weights) {
  OneSidedInput& in = plan.in;
  in.topk_idx = counted.topk_idx, in.number = counted.number, in.place_counts = counted.workspace;
  in.weights = at(weights), in.said = at(said), in.said_ints = counted.said_ints();
  in.kept = at(kept), in.scratch = at(scratch), in.arrived_weights = at(arrived_weights);
  return plan;
}

}  // namespace

void bind_one_sided(py::module_& m) {
  py::class_<OneSidedSetup>(m, "OneSidedSetup", "What all plans of a dispatcher over windows share.")
      .def(py::init([](const TableView& table, int top_k, int alignment, int64_t capacity, bool flat,
                       bool on_device, int tokens_at) {
             return OneSidedSetup{table, top_k, alignment, capacity, flat, tokens_at, on_device};
           }),
           py::kw_only(), py::arg("table"), py::arg("top_k"), py::arg("alignment"), py::arg("capacity"),
           py::arg("flat"), py::arg("on_device"), py::arg("tokens_at"));
  m.def(
      "kept_ints",
      [](const OneSidedSetup& setup, int tokens, int left, int received, int rows) {
        const KeptInts ints = kept_ints(setup, tokens, left, received, rows);
        return std::vector<int64_t>(std::begin(ints.of), std::end(ints.of));
      },
      py::arg("setup"), py::arg("tokens"), py::arg("left"), py::arg("received"), py::arg("rows"));
  m.def("scratch_ints", &scratch_ints, py::arg("setup"), py::arg("tokens"), py::arg("left"),
        py::arg("received"), py::arg("has_weights"));
  py::class_<OneSidedPlan>(m, "OneSidedPlan", "One rank's steps of a plan, in memory that its caller keeps.")
      .def(py::init(&plan), py::arg("setup"), py::arg("rank"), py::arg("first_place"), py::arg("places"),
           py::arg("tokens"), py::arg("has_weights"), py::arg("left"), py::arg("received"), py::arg("rows"))
      .def("in_memory", &in_memory, py::arg("counted"), py::arg("weights"), py::arg("said"), py::arg("kept"),
           py::arg("scratch"), py::arg("arrived_weights"))
      .def(
          "lists", [](const OneSidedPlan& plan) { return route_lists(plan.setup, plan.in); },
          "What calls through the plan read of it.");
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  m.def(
      "plan_on_host",
      [](HostWindows& windows, const std::vector<OneSidedPlan>& ranks, int counts, int records,
         double seconds) { return plan_on_host(windows, ranks, {counts, records, seconds}); },
      unlocked, py::arg("windows"), py::arg("ranks"), py::arg("counts_op"), py::arg("records_op"),
      py::arg("seconds"));
  py::class_<SlotsToCount>(m, "SlotsToCount")
      .def(py::init<std::vector<CountSlots>, std::vector<Address>, int>(), py::arg("steps"),
           py::arg("boards"), py::arg("op"));
  m.def("count_on_device", &count_on_device, unlocked, py::arg("world"), py::arg("slots"), py::arg("seconds"),
        py::arg("stream"));
  m.def(
      "plan_on_device",
      [](const DeviceWorld& world, const std::vector<OneSidedPlan>& ranks, int counts, int records,
         double seconds,
         Address stream) { plan_on_device(world, ranks, {counts, records, seconds}, stream); },
      unlocked, py::arg("world"), py::arg("ranks"), py::arg("counts_op"), py::arg("records_op"),
      py::arg("seconds"), py::arg("stream"));
  m.def(
      "count_and_plan_on_device",
      [](const DeviceWorld& world, const SlotsToCount& slots, const std::vector<OneSidedPlan>& ranks,
         int counts, int records, double seconds, Address stream) {
        count_and_plan_on_device(world, slots, ranks, {counts, records, seconds}, stream);
      },
      unlocked, py::arg("world"), py::arg("slots"), py::arg("ranks"), py::arg("counts_op"),
      py::arg("records_op"), py::arg("seconds"), py::arg("stream"));
}

}  // namespace flexep
