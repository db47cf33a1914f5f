#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "bind/bind.h"
#include "kernels/plan.h"

namespace flexep {
namespace {

namespace py = pybind11;
using Stream = std::optional<uintptr_t>;  // None: run on the host now

template <class Step>
void run(const Step& step, Stream stream) {
  py::gil_scoped_release unlocked;
  if (stream)
    launch_plan(step, plan_shape(step), *stream);
  else
    run_plan(step);
}

TableView table(int experts, int ranks, Address place_of_expert, Address rank_of_place, Address rank_begin) {
  return {experts, ranks, at(place_of_expert), at(rank_of_place), at(rank_begin)};
}

/// Of slots of one shape, in no memory yet.
CountSlots count_slots(const TableView& t, bool wide, int tokens, int top_k, int domains) {
  CountSlots step{};
  step.topk_idx.wide = wide;
  step.tokens = tokens, step.top_k = top_k, step.table = t, step.domains = domains;
  return step;
}

CountSlots in_memory(CountSlots step, Address topk_idx, Address weights, std::tuple<int, int, int, int> stamp,
                     Address memory, Address masked) {
  step.topk_idx.values = at<const void>(topk_idx);
  step.weights = at<float>(weights);
  std::tie(step.stamp[0], step.stamp[1], step.stamp[2], step.stamp[3]) = stamp;
  step.lie_in(at(memory));
  step.masked = at<int64_t>(masked);
  return step;
}

void resolve_rows(const TableView& t, Address counts, int64_t stride, int alignment, int64_t capacity,
                  Address base, Address start, Address kept, Address padded, Address dropped, Address cut,
                  Address num_rows, Stream stream) {
  run(ResolveRows{at(counts), stride, t, alignment, capacity, -1, at(base), at(start), at(kept), at(padded),
                  at(dropped), at(cut), at<int64_t>(num_rows)},
      stream);
}

/// What a SendOrder writes, but for how many rows leave for each owner.
SendOrder send_order(int rows, int top_k, int owners, int unit, int split, int num_send, Address order,
                     Address slot_send, Address send_row, Address send_first, Address send_token) {
  return {rows,      top_k,         owners,       unit,           split,          num_send,
          at(order), at(slot_send), at(send_row), at(send_first), at(send_token), nullptr};
}

void assign_rows(const TableView& t, const Integers& topk_idx, Address number, Address place_counts,
                 Address base, Address start, Address cut, int domains, Address weights, bool has_weights,
                 Address slot_row, Address slot_rank, SendOrder order, Address send_counts, Address meta,
                 Address workspace, Stream stream) {
  order.counts = at(send_counts) + (domains > 0 ? t.ranks : 0);
  const RecordShape shape{order.top_k, domains > 0, has_weights};
  run(AssignRows{topk_idx,
                 t,
                 at(number),
                 at(place_counts),
                 CountSlots::keys(t.experts, t.ranks, domains),
                 at(base),
                 at(start),
                 at(cut),
                 domains,
                 at(weights),
                 at(slot_row),
                 at(slot_rank),
                 order,
                 at(send_counts),
                 {shape, at(meta)},
                 at(workspace)},
      stream);
}

void count_peers(const SentCounts& sent, Address tokens, int64_t tokens_stride, int rank, Address tokens_of,
                 Address send, Address recv, Address recv_base, Address rail_out, Address rail_in,
                 Address member_out, Address member_in, Address arrival, Address relay_base, Stream stream) {
  run(PeerCounts{sent, at(tokens), tokens_stride, rank, at(tokens_of), at(send), at(recv), at(recv_base),
                 at(rail_out), at(rail_in), at(member_out), at(member_in), at(arrival), at(relay_base)},
      stream);
}

void relay_records(Address rail, bool has_weights, Address used, Address token, SendOrder order,
                   Address send_counts, Address meta, Address workspace, Stream stream) {
  order.counts = at(send_counts);
  run(RelayRecords{at(rail),
                   {order.top_k, true, has_weights},
                   at(used),
                   at(token),
                   order,
                   {{order.top_k, false, has_weights}, at(meta)},
                   at(workspace)},
      stream);
}

void receive_rows(Address meta, int top_k, bool has_weights, int received, int num_rows, int ranks,
                  Address base, Address arrival, int experts, Address start, Address token, Address rows,
                  Address weights, Address expert, Address row_src, Address row_weights, Address row_map,
                  Address order, Stream stream) {
  run(ClearRows{num_rows, at(row_src), at(row_weights), at(row_map)}, stream);
  run(ReceiveRows{at(meta),
                  {top_k, false, has_weights},
                  received,
                  num_rows,
                  ranks,
                  at(base),
                  at(arrival),
                  experts,
                  at(start),
                  at(token),
                  at(rows),
                  at(weights),
                  at(expert),
                  at(row_src),
                  at(row_weights),
                  at(row_map),
                  at(order)},
      stream);
}

void invert_rows(Address rows, int received, int top_k, int num_rows, Address row_src, Stream stream) {
  run(InvertRows{at(rows), received, top_k, num_rows, at(row_src)}, stream);
}

void compact_rows(Address rows, Address rows_rank, int rank, int padded, int top_k, int num_compact,
                  Address source, Address compact, Address workspace, Stream stream) {
  run(CompactRows{at(rows), at(rows_rank), rank, padded, top_k, num_compact, at(source), at(compact),
                  at(workspace)},
      stream);
}

void plan_permutation(const Integers& topk_idx, int tokens, int top_k, int experts, int alignment,
                      int64_t capacity, Address ids, Address row_map, Address row_src, Address counts,
                      Address padded, Address dropped, Address outside, Address num_rows, Address workspace,
                      Stream stream, int blocks, int lanes) {
  const PlanPermutation step{
      topk_idx,     tokens,      top_k,      experts,    alignment,   capacity,    at(ids),
      at(row_map),  at(row_src), at(counts), at(padded), at(dropped), at(outside), at<int64_t>(num_rows),
      at(workspace)};
  if (!stream) return run(step, stream);
  py::gil_scoped_release unlocked;
  PlanShape shape = plan_shape(step);
  if (blocks > 0) shape.blocks = std::min(blocks, kCountingBlocks);
  if (lanes > 0) shape.lanes = std::clamp(lanes / kWarp * kWarp, kWarp, shape.lanes);
  launch_plan(step, shape, *stream);
}

void transpose_chunks(int num_rows, int outer, int inner, Address map, Stream stream) {
  run(TransposeChunks{num_rows, outer, inner, at(map)}, stream);
}

std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t> exact_sizes(const SentCounts& sent, Address counts,
                                                                    const TableView& table, int alignment,
                                                                    int rank) {
  const ExactSizes sizes(sent, at(counts), table, alignment, rank);
  return {sizes.left, sizes.received, sizes.rows, sizes.relayed, sizes.handed};
}

/// Enough for every step over that many experts and ranks.
int64_t plan_workspace_ints(int experts, int ranks, bool on_device) {
  if (!on_device) return CountSlots::keys(experts, ranks, ranks);
  const TableView table{experts, ranks, nullptr, nullptr, nullptr};
  CountSlots count{};
  AssignRows assign{};
  PlanPermutation permutation{};
  count.table = assign.table = table;
  count.domains = assign.domains = ranks;  // as many as there can be
  permutation.experts = experts;
  const auto most = [](const auto& step) {
    return launch_ints(step, {kCountingBlocks, plan_shape(step).lanes});
  };
  return std::max({most(count), most(assign), most(permutation)});
}

}  // namespace

void bind_plan(py::module_& m) {
  py::class_<TableView>(m, "TableView")
      .def(py::init(&table), py::arg("experts"), py::arg("ranks"), py::arg("place_of_expert"),
           py::arg("rank_of_place"), py::arg("rank_begin"));
  py::class_<Integers>(m, "Integers", "int32 or int64 values behind an address; address 0: none.")
      .def(py::init([](Address values, bool wide) { return Integers{at<const void>(values), wide}; }),
           py::arg("values"), py::arg("wide"));
  py::class_<SendOrder>(m, "SendOrder", "Where rows leave for, and the tensors that say so.")
      .def(py::init(&send_order), py::kw_only(), py::arg("rows"), py::arg("top_k"), py::arg("owners"),
           py::arg("unit"), py::arg("split"), py::arg("num_send"), py::arg("order"), py::arg("slot_send"),
           py::arg("send_row"), py::arg("send_first"), py::arg("send_token"));
  py::class_<SentCounts>(m, "SentCounts", "Everybody's tokens for each rank and domain, a row a source.")
      .def(py::init([](Address counts, int64_t stride, int ranks, int domains) {
             return SentCounts{at(counts), stride, ranks, domains};
           }),
           py::kw_only(), py::arg("counts"), py::arg("stride"), py::arg("ranks"), py::arg("domains"));
  py::class_<CountSlots>(m, "CountSlots", "One rank's slots, to be counted.")
      .def(py::init(&count_slots), py::arg("table"), py::arg("wide"), py::arg("tokens"), py::arg("top_k"),
           py::arg("domains"))
      .def("in_memory", &in_memory, py::arg("topk_idx"), py::arg("weights"), py::arg("stamp"),
           py::arg("memory"), py::arg("masked"))
      .def_property_readonly("said_ints", &CountSlots::said_ints);
  m.def("count_slots", &run<CountSlots>, py::arg("step"), py::arg("stream"));
  m.def("resolve_rows", &resolve_rows, py::arg("table"), py::kw_only(), py::arg("counts"), py::arg("stride"),
        py::arg("alignment"), py::arg("capacity"), py::arg("base"), py::arg("start"), py::arg("kept"),
        py::arg("padded"), py::arg("dropped"), py::arg("cut"), py::arg("num_rows"), py::arg("stream"));
  m.def("assign_rows", &assign_rows, py::arg("table"), py::arg("topk_idx"), py::kw_only(), py::arg("number"),
        py::arg("place_counts"), py::arg("base"), py::arg("start"), py::arg("cut"), py::arg("domains"),
        py::arg("weights"), py::arg("has_weights"), py::arg("slot_row"), py::arg("slot_rank"),
        py::arg("order"), py::arg("send_counts"), py::arg("meta"), py::arg("workspace"), py::arg("stream"));
  m.def("count_peers", &count_peers, py::kw_only(), py::arg("sent"), py::arg("tokens"),
        py::arg("tokens_stride"), py::arg("rank"), py::arg("tokens_of"), py::arg("send"), py::arg("recv"),
        py::arg("recv_base"), py::arg("rail_out"), py::arg("rail_in"), py::arg("member_out"),
        py::arg("member_in"), py::arg("arrival"), py::arg("relay_base"), py::arg("stream"));
  m.def("relay_records", &relay_records, py::kw_only(), py::arg("rail"), py::arg("has_weights"),
        py::arg("used"), py::arg("token"), py::arg("order"), py::arg("send_counts"), py::arg("meta"),
        py::arg("workspace"), py::arg("stream"));
  m.def("receive_rows", &receive_rows, py::kw_only(), py::arg("meta"), py::arg("top_k"),
        py::arg("has_weights"), py::arg("received"), py::arg("num_rows"), py::arg("ranks"), py::arg("base"),
        py::arg("arrival"), py::arg("experts"), py::arg("start"), py::arg("token"), py::arg("rows"),
        py::arg("weights"), py::arg("expert"), py::arg("row_src"), py::arg("row_weights"), py::arg("row_map"),
        py::arg("order"), py::arg("stream"));
  m.def("exact_sizes", &exact_sizes, py::arg("sent"), py::arg("counts"), py::arg("table"),
        py::arg("alignment"), py::arg("rank"),
        "{records that leave, received rows, expert-major rows, relayed records, records inside the domain}");
  m.def("invert_rows", &invert_rows, py::kw_only(), py::arg("rows"), py::arg("received"), py::arg("top_k"),
        py::arg("num_rows"), py::arg("row_src"), py::arg("stream"));
  m.def("compact_rows", &compact_rows, py::kw_only(), py::arg("rows"), py::arg("rows_rank"), py::arg("rank"),
        py::arg("padded"), py::arg("top_k"), py::arg("num_compact"), py::arg("source"), py::arg("compact"),
        py::arg("workspace"), py::arg("stream"));
  m.def("plan_permutation", &plan_permutation, py::arg("topk_idx"), py::kw_only(), py::arg("tokens"),
        py::arg("top_k"), py::arg("experts"), py::arg("alignment"), py::arg("capacity"), py::arg("ids"),
        py::arg("row_map"), py::arg("row_src"), py::arg("counts"), py::arg("padded"), py::arg("dropped"),
        py::arg("outside"), py::arg("num_rows"), py::arg("workspace"), py::arg("stream"),
        py::arg("blocks") = 0, py::arg("lanes") = 0,
        "`blocks` and `lanes` of a launch on a GPU, 0: chosen; no more than those that the workspace holds.");
  m.def("transpose_chunks", &transpose_chunks, py::kw_only(), py::arg("num_rows"), py::arg("outer"),
        py::arg("inner"), py::arg("map"), py::arg("stream"));
  m.attr("HEADER_INTS") = CountSlots::kHeader;
  m.def("plan_workspace_ints", &plan_workspace_ints, py::arg("experts"), py::arg("ranks"),
        py::arg("on_device"));
}

}  // namespace flexep
