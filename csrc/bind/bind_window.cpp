#include <pybind11/stl.h>

#include <tuple>

#include "bind/bind.h"
#include "kernels/host_exec.h"

namespace flexep {
namespace {

namespace py = pybind11;

WindowShape make_shape(int ranks, int domain_size, int slices, int slots, int pull_tokens, int push_tokens,
                       int pull_row_bytes, int push_row_bytes, int mail_bytes, int board_ints,
                       int registered_rows, int landed_rows) {
  return {{ranks, domain_size}, slices,     slots,      pull_tokens,     push_tokens, pull_row_bytes,
          push_row_bytes,       mail_bytes, board_ints, registered_rows, landed_rows};
}

RouteLists make_lists(Address tokens_of, Address token, Address base, Address rows, int top_k,
                      Address row_src, Address home_rank, Address relay_token, Address relay_base,
                      Address relay_members) {
  return {at(tokens_of),
          {at(token), at(base), at(rows), top_k},
          {at(relay_token), at(relay_base), at(relay_members)},
          at(row_src),
          at(home_rank)};
}

DeliverArgs make_deliver(const RouteLists& lists, Address x, Address registered, bool offers_all, Address out,
                         int64_t num_rows, bool flat, Address weights, Address dot_with, Address dots,
                         int dtype, int64_t hidden) {
  return {lists.tokens_of,
          at<void>(x),
          at(registered),
          offers_all ? nullptr : lists.home_rank,
          lists.arrivals,
          lists.relayed,
          at<void>(out),
          num_rows,
          flat,
          lists.row_src,
          at<float>(weights),
          at<void>(dot_with),
          at<float>(dots),
          DType{dtype},
          hidden};
}

CollectArgs make_collect(const RouteLists& lists, Address y, bool flat, Address part_weights, int nest,
                         Address z, int dtype, int wire, int out_dtype, int64_t hidden) {
  return {lists.tokens_of,
          at<void>(y),
          flat,
          at<float>(part_weights),
          lists.arrivals,
          lists.relayed,
          lists.home_rank,
          nest,
          at<void>(z),
          DType{dtype},
          DType{wire},
          DType{out_dtype},
          hidden};
}

RecordArgs make_records(Address send, Address send_splits, Address recv, Address recv_splits,
                        int64_t record_bytes) {
  return {at<void>(send), at<int32_t>(send_splits), at<void>(recv), at<int32_t>(recv_splits), record_bytes};
}

PublishArgs make_publish(Address ints, int count, Address all) {
  return {at<int32_t>(ints), count, at<int32_t>(all)};
}

void bind_args(py::module_& m) {
  py::class_<WindowShape>(m, "WindowShape")
      .def(py::init(&make_shape), py::kw_only(), py::arg("ranks"), py::arg("domain_size"), py::arg("slices"),
           py::arg("slots"), py::arg("pull_tokens"), py::arg("push_tokens"), py::arg("pull_row_bytes"),
           py::arg("push_row_bytes"), py::arg("mail_bytes"), py::arg("board_ints"),
           py::arg("registered_rows"), py::arg("landed_rows"))
      .def_property_readonly("bytes", [](const WindowShape& s) { return WindowLayout(s).bytes; })
      .def_property_readonly("registered_at",
                             [](const WindowShape& s) { return WindowLayout(s).registered.at; });
  py::class_<RouteLists>(m, "RouteLists", "What delivery and collection read of a route.")
      .def(py::init(&make_lists), py::kw_only(), py::arg("tokens_of"), py::arg("token"), py::arg("base"),
           py::arg("rows"), py::arg("top_k"), py::arg("row_src"), py::arg("home_rank"),
           py::arg("relay_token"), py::arg("relay_base"), py::arg("relay_members"));
  py::class_<DeliverArgs>(m, "DeliverArgs")
      .def(py::init(&make_deliver), py::arg("lists"), py::arg("x"), py::arg("registered"),
           py::arg("offers_all"), py::arg("out"), py::arg("num_rows"), py::arg("flat"), py::arg("weights"),
           py::arg("dot_with"), py::arg("dots"), py::arg("dtype"), py::arg("hidden"));
  py::class_<CollectArgs>(m, "CollectArgs")
      .def(py::init(&make_collect), py::arg("lists"), py::arg("y"), py::arg("flat"), py::arg("part_weights"),
           py::arg("nest"), py::arg("z"), py::arg("dtype"), py::arg("wire"), py::arg("out_dtype"),
           py::arg("hidden"));
  py::class_<RecordArgs>(m, "RecordArgs")
      .def(py::init(&make_records), py::kw_only(), py::arg("send"), py::arg("send_splits"), py::arg("recv"),
           py::arg("recv_splits"), py::arg("record_bytes"));
  py::class_<PublishArgs>(m, "PublishArgs")
      .def(py::init(&make_publish), py::kw_only(), py::arg("ints"), py::arg("count"), py::arg("all"));
}

/// (epoch, chunks, operation) of a signal.
std::tuple<Epoch, int, int> parts_of(Signal signal) {
  return {epoch_of(signal), chunks_of(signal), op_of(signal)};
}

void bind_reports(py::module_& m) {
  m.attr("MAX_CHUNKS") = kMaxChunks;
  m.attr("MOST_MAIL_SLICES") = kMostMailSlices;
  py::class_<FaultRecord>(m, "FaultRecord")
      .def_readonly("epoch", &FaultRecord::epoch)
      .def_readonly("op", &FaultRecord::op)
      .def_property_readonly("status", [](const FaultRecord& f) { return kStatusNames[f.status]; })
      .def_readonly("waiter", &FaultRecord::waiter)
      .def_readonly("awaited", &FaultRecord::awaited)
      .def_property_readonly("word", [](const FaultRecord& f) { return kWordNames[f.word]; })
      .def_property_readonly("want", [](const FaultRecord& f) { return parts_of(f.want); })
      .def_property_readonly("got", [](const FaultRecord& f) { return parts_of(f.got); });
  py::class_<Moved>(m, "Moved")
      .def_readonly("rows", &Moved::rows)
      .def_readonly("bytes", &Moved::bytes)
      .def_readonly("rail_rows", &Moved::rail_rows)
      .def_readonly("rail_bytes", &Moved::rail_bytes);
  py::class_<Report>(m, "Report")
      .def_property_readonly("status",
                             [](const Report& r) { return kStatusNames[static_cast<int>(r.status)]; })
      .def_readonly("fault", &Report::fault)
      .def_readonly("moved", &Report::moved);
}

}  // namespace

void bind_window(py::module_& m) {
  py::register_exception<WindowBusy>(m, "WindowBusy", PyExc_RuntimeError);
  py::register_exception<WindowBroken>(m, "WindowBroken", PyExc_RuntimeError);
  bind_args(m);
  bind_reports(m);
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<HostWindows>(m, "HostWindows")
      .def(py::init<const WindowShape&, const std::vector<Address>&, const std::vector<int>&>(),
           py::arg("shape"), py::arg("windows"), py::arg("hosted"))
      .def("publish", &HostWindows::publish, unlocked, py::arg("args"), py::arg("op"), py::arg("seconds"))
      .def("exchange_records", &HostWindows::exchange_records, unlocked, py::arg("args"), py::arg("op"),
           py::arg("seconds"))
      .def("deliver", &HostWindows::deliver, unlocked, py::arg("args"), py::arg("op"), py::arg("seconds"),
           py::arg("lanes"))
      .def("collect", &HostWindows::collect, unlocked, py::arg("args"), py::arg("op"), py::arg("seconds"),
           py::arg("lanes"))
      .def("leave", &HostWindows::leave)
      .def_property_readonly("epoch", &HostWindows::epoch);
}

}  // namespace flexep
