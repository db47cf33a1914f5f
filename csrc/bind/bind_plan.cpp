#include <pybind11/stl.h>

#include <algorithm>
#include <optional>

#include "bind/bind.h"
#include "kernels/plan.h"

namespace flexep {
namespace {

namespace py = pybind11;
using Address = uintptr_t;
using Stream = std::optional<uintptr_t>;  // None: run on the host now

template <class T = int32_t>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

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

void count_slots(const TableView& t, Address topk_idx, int tokens, int top_k, Address counts,
                 Address rank_tokens, Address workspace, Stream stream) {
  run(CountSlots{at(topk_idx), tokens, top_k, t, at(counts), at(rank_tokens), at(workspace)}, stream);
}

void resolve_rows(const TableView& t, Address counts, int alignment, int64_t capacity, Address base,
                  Address start, Address kept, Address dropped, Address cut, Address num_rows,
                  Stream stream) {
  run(ResolveRows{at(counts), t, alignment, capacity, at(base), at(start), at(kept), at(dropped), at(cut),
                  at<int64_t>(num_rows)},
      stream);
}

void assign_rows(const TableView& t, Address topk_idx, int tokens, int top_k, Address base, Address start,
                 Address cut, int split, int num_send, Address slot_row, Address slot_rank, Address slot_send,
                 Address send_row, Address send_rank, Address send_token, Address send_counts,
                 Address workspace, Stream stream) {
  run(AssignRows{at(topk_idx), tokens, top_k, t, at(base), at(start), at(cut), split, num_send, at(slot_row),
                 at(slot_rank), at(slot_send), at(send_row), at(send_rank), at(send_token), at(send_counts),
                 at(workspace)},
      stream);
}

void pack_meta(Address slot_row, Address slot_send, Address send_token, Address weights, bool has_weights,
               int tokens, int top_k, int num_send, Address meta, Stream stream) {
  run(PackMeta{at(slot_row), at(slot_send), at(send_token), at(weights), has_weights, tokens, top_k, num_send,
               at(meta)},
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

/// Enough for every step over that many experts and ranks.
int64_t plan_workspace_ints(int experts, int ranks, bool on_device) {
  if (!on_device) return static_cast<int64_t>(experts) + ranks;
  const TableView table{experts, ranks, nullptr, nullptr, nullptr};
  CountSlots count{};
  AssignRows assign{};
  PlanPermutation permutation{};
  count.table = assign.table = table;
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
  m.def("count_slots", &count_slots, py::arg("table"), py::kw_only(), py::arg("topk_idx"), py::arg("tokens"),
        py::arg("top_k"), py::arg("counts"), py::arg("rank_tokens"), py::arg("workspace"), py::arg("stream"));
  m.def("resolve_rows", &resolve_rows, py::arg("table"), py::kw_only(), py::arg("counts"),
        py::arg("alignment"), py::arg("capacity"), py::arg("base"), py::arg("start"), py::arg("kept"),
        py::arg("dropped"), py::arg("cut"), py::arg("num_rows"), py::arg("stream"));
  m.def("assign_rows", &assign_rows, py::arg("table"), py::kw_only(), py::arg("topk_idx"), py::arg("tokens"),
        py::arg("top_k"), py::arg("base"), py::arg("start"), py::arg("cut"), py::arg("split"),
        py::arg("num_send"), py::arg("slot_row"), py::arg("slot_rank"), py::arg("slot_send"),
        py::arg("send_row"), py::arg("send_rank"), py::arg("send_token"), py::arg("send_counts"),
        py::arg("workspace"), py::arg("stream"));
  m.def("pack_meta", &pack_meta, py::kw_only(), py::arg("slot_row"), py::arg("slot_send"),
        py::arg("send_token"), py::arg("weights"), py::arg("has_weights"), py::arg("tokens"),
        py::arg("top_k"), py::arg("num_send"), py::arg("meta"), py::arg("stream"));
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
  m.def("plan_workspace_ints", &plan_workspace_ints, py::arg("experts"), py::arg("ranks"),
        py::arg("on_device"));
}

}  // namespace flexep
