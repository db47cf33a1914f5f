#include <pybind11/stl.h>

#include <optional>

#include "base/isa.h"
#include "bind/bind.h"
#include "ops/cast.h"
#include "ops/maps.h"
#include "ops/rows.h"
#include "ops/rows_cuda.h"
#include "ops/segments.h"

namespace py = pybind11;

namespace flexep {
namespace {

/// (address, bytes between rows, dtype code)
using Rows = std::tuple<Address, std::int64_t, int>;

RowsIn rows_in(const Rows& rows) {
  return {at<const void>(std::get<0>(rows)), std::get<1>(rows), static_cast<DType>(std::get<2>(rows))};
}

using Released = py::call_guard<py::gil_scoped_release>;

/// The row functors that are enqueued on a CUDA stream; checked by the caller as rows_cuda.h asks.
void bind_rows_cuda(py::module_& m) {
  m.def(
      "gather_rows_cuda",
      [](Address out, const Rows& src, std::int64_t src_rows, Address idx, Address weights, std::int64_t rows,
         std::int64_t hidden, Address stream) {
        gather_rows_cuda(at<void>(out), rows_in(src), src_rows, at<const std::int32_t>(idx),
                         at<const float>(weights), rows, hidden, stream);
      },
      py::kw_only(), py::arg("out"), py::arg("src"), py::arg("src_rows"), py::arg("idx"), py::arg("weights"),
      py::arg("rows"), py::arg("hidden"), py::arg("stream"), Released());

  m.def(
      "expand_rows_cuda",
      [](Address out, const Rows& src, Address row_map, Address row_src, Address weights, Address carried,
         Address carried_out, Address words, Address words_out, std::int64_t words_a_row, std::int64_t tokens,
         std::int64_t top_k, std::int64_t rows, std::int64_t hidden, Address stream) {
        const ExpandArgs args{at<void>(out),
                              rows_in(src),
                              at<const std::int32_t>(row_map),
                              at<const std::int32_t>(row_src),
                              at<const float>(weights),
                              at<const float>(carried),
                              at<float>(carried_out),
                              at<const std::uint32_t>(words),
                              at<std::uint32_t>(words_out),
                              words_a_row,
                              tokens,
                              top_k,
                              rows,
                              hidden};
        expand_rows_cuda(args, stream);
      },
      py::kw_only(), py::arg("out"), py::arg("src"), py::arg("row_map"), py::arg("row_src"),
      py::arg("weights"), py::arg("carried"), py::arg("carried_out"), py::arg("words"), py::arg("words_out"),
      py::arg("words_a_row"), py::arg("tokens"), py::arg("top_k"), py::arg("rows"), py::arg("hidden"),
      py::arg("stream"), Released());

  m.def(
      "reduce_rows_cuda",
      [](Address out, int out_dtype, const Rows& src, std::int64_t src_rows, Address idx, Address weights,
         Address groups, int group_dtype, bool sort, std::int64_t tokens, std::int64_t top_k,
         std::int64_t hidden, Address stream) {
        const ReduceArgs args{rows_in(src),
                              at<const std::int32_t>(idx),
                              at<const float>(weights),
                              at<const std::int32_t>(groups),
                              static_cast<DType>(group_dtype),
                              sort,
                              tokens,
                              top_k,
                              hidden};
        reduce_rows_cuda(at<void>(out), static_cast<DType>(out_dtype), args, src_rows, stream);
      },
      py::kw_only(), py::arg("out"), py::arg("out_dtype"), py::arg("src"), py::arg("src_rows"),
      py::arg("idx"), py::arg("weights"), py::arg("groups"), py::arg("group_dtype"), py::arg("sort"),
      py::arg("tokens"), py::arg("top_k"), py::arg("hidden"), py::arg("stream"), Released());

  m.def(
      "dot_rows_cuda",
      [](Address out, const Rows& a, const Rows& b, std::int64_t b_rows, Address idx, std::int64_t count,
         std::int64_t repeat, std::int64_t hidden, Address stream) {
        dot_rows_cuda({at<float>(out), rows_in(a), rows_in(b), b_rows, at<const std::int32_t>(idx), count,
                       repeat, hidden},
                      stream);
      },
      py::kw_only(), py::arg("out"), py::arg("a"), py::arg("b"), py::arg("b_rows"), py::arg("idx"),
      py::arg("count"), py::arg("repeat"), py::arg("hidden"), py::arg("stream"), Released());

  m.def(
      "take_cuda",
      [](Address out, Address values, std::int64_t num_values, Address index, std::int64_t count,
         Address stream) {
        take_cuda(at<float>(out), at<const float>(values), num_values, at<const std::int32_t>(index), count,
                  stream);
      },
      py::kw_only(), py::arg("out"), py::arg("values"), py::arg("num_values"), py::arg("index"),
      py::arg("count"), py::arg("stream"), Released());

  m.def(
      "segment_map_cuda",
      [](Address map, Address sizes, Address order, std::int64_t rows, std::int64_t segments,
         std::int64_t out_alignment, std::int64_t src_alignment, Address stream) {
        segment_map_cuda({at<std::int32_t>(map), at<const std::int32_t>(sizes), at<const std::int32_t>(order),
                          rows, segments, out_alignment, src_alignment},
                         stream);
      },
      py::kw_only(), py::arg("map"), py::arg("sizes"), py::arg("order"), py::arg("rows"), py::arg("segments"),
      py::arg("out_alignment"), py::arg("src_alignment"), py::arg("stream"), Released());
}

using Stream = std::optional<Address>;  // None: run on the host now, on `threads` threads

void bind_cast(py::module_& m) {
  m.def(
      "quantize_rows",
      [](Address payload, Address scales, const Rows& src, Address row_map, Address row_src,
         std::int64_t tokens, std::int64_t top_k, std::int64_t rows, std::int64_t hidden, int threads,
         Stream stream) {
        const QuantizeArgs args{at<std::uint8_t>(payload),
                                at<float>(scales),
                                rows_in(src),
                                at<const std::int32_t>(row_map),
                                at<const std::int32_t>(row_src),
                                tokens,
                                top_k,
                                rows,
                                hidden};
        stream ? quantize_rows_cuda(args, *stream) : quantize_rows(args, threads);
      },
      py::kw_only(), py::arg("payload"), py::arg("scales"), py::arg("src"), py::arg("row_map"),
      py::arg("row_src"), py::arg("tokens"), py::arg("top_k"), py::arg("rows"), py::arg("hidden"),
      py::arg("threads"), py::arg("stream"), Released());

  m.def(
      "dequantize_rows",
      [](Address out, int out_dtype, const Rows& payload, Address scales, std::int64_t rows,
         std::int64_t hidden, int threads, Stream stream) {
        const DequantizeArgs args{
            at<void>(out), static_cast<DType>(out_dtype), rows_in(payload), at<const float>(scales), rows,
            hidden};
        stream ? dequantize_rows_cuda(args, *stream) : dequantize_rows(args, threads);
      },
      py::kw_only(), py::arg("out"), py::arg("out_dtype"), py::arg("payload"), py::arg("scales"),
      py::arg("rows"), py::arg("hidden"), py::arg("threads"), py::arg("stream"), Released());
}

}  // namespace

void bind_ops(py::module_& m) {
  const Released released;

  bind_rows_cuda(m);
  bind_cast(m);
  m.def("isa_names", &isa_names, "Vector paths that this build holds and this CPU runs, slowest first.");
  m.def("set_isa", &set_isa, py::arg("name"),
        "Choose the vector path for this process; returns the one it replaces.");

  m.def(
      "first_outside",
      [](Address values, std::int64_t count, std::int32_t low, std::int32_t high) {
        return first_outside(at<const std::int32_t>(values), count, low, high);
      },
      py::arg("values"), py::arg("count"), py::arg("low"), py::arg("high"), released);

  m.def(
      "narrow",
      [](Address out, Address values, std::int64_t count, std::int32_t low, std::int32_t high) {
        return narrow(at<std::int32_t>(out), at<const std::int64_t>(values), count, low, high);
      },
      py::arg("out"), py::arg("values"), py::arg("count"), py::arg("low"), py::arg("high"), released);

  m.def(
      "gather_rows",
      [](Address out, const Rows& src, Address idx, Address weights, std::int64_t rows, std::int64_t hidden,
         int threads) {
        gather_rows(at<void>(out), rows_in(src), at<const std::int32_t>(idx), at<const float>(weights), rows,
                    hidden, threads);
      },
      py::arg("out"), py::arg("src"), py::arg("idx"), py::arg("weights"), py::arg("rows"), py::arg("hidden"),
      py::arg("threads"), released);

  m.def(
      "expand_rows",
      [](Address out, const Rows& src, Address row_map, Address row_src, Address weights, std::int64_t tokens,
         std::int64_t top_k, std::int64_t rows, std::int64_t hidden, int threads) {
        expand_rows(at<void>(out), rows_in(src), at<const std::int32_t>(row_map),
                    at<const std::int32_t>(row_src), at<const float>(weights), tokens, top_k, rows, hidden,
                    threads);
      },
      py::arg("out"), py::arg("src"), py::arg("row_map"), py::arg("row_src"), py::arg("weights"),
      py::arg("tokens"), py::arg("top_k"), py::arg("rows"), py::arg("hidden"), py::arg("threads"), released);

  m.def(
      "reduce_rows",
      [](Address out, int out_dtype, const Rows& src, Address idx, Address weights, Address groups,
         int group_dtype, bool sort, std::int64_t tokens, std::int64_t top_k, std::int64_t hidden,
         int threads) {
        const ReduceArgs args{rows_in(src),
                              at<const std::int32_t>(idx),
                              at<const float>(weights),
                              at<const std::int32_t>(groups),
                              static_cast<DType>(group_dtype),
                              sort,
                              tokens,
                              top_k,
                              hidden};
        reduce_rows(at<void>(out), static_cast<DType>(out_dtype), args, threads);
      },
      py::arg("out"), py::arg("out_dtype"), py::arg("src"), py::arg("idx"), py::arg("weights"),
      py::arg("groups"), py::arg("group_dtype"), py::arg("sort"), py::arg("tokens"), py::arg("top_k"),
      py::arg("hidden"), py::arg("threads"), released);

  m.def(
      "dot_rows",
      [](Address out, const Rows& a, const Rows& b, Address idx, std::int64_t rows, std::int64_t hidden,
         int threads) {
        dot_rows(at<float>(out), rows_in(a), rows_in(b), at<const std::int32_t>(idx), rows, hidden, threads);
      },
      py::arg("out"), py::arg("a"), py::arg("b"), py::arg("idx"), py::arg("rows"), py::arg("hidden"),
      py::arg("threads"), released);

  m.def(
      "indices_to_multihot",
      [](Address mask, Address probs, Address idx, Address weights, std::int64_t tokens, std::int64_t top_k,
         std::int64_t experts) {
        indices_to_multihot(at<std::uint8_t>(mask), at<float>(probs), at<const std::int32_t>(idx),
                            at<const float>(weights), {tokens, top_k, experts});
      },
      py::arg("mask"), py::arg("probs"), py::arg("idx"), py::arg("weights"), py::arg("tokens"),
      py::arg("top_k"), py::arg("experts"), released);

  m.def(
      "multihot_to_indices",
      [](Address idx, Address weights, Address mask, Address probs, std::int64_t tokens, std::int64_t top_k,
         std::int64_t experts) {
        return multihot_to_indices(at<std::int32_t>(idx), at<float>(weights), at<const std::uint8_t>(mask),
                                   at<const float>(probs), {tokens, top_k, experts});
      },
      py::arg("idx"), py::arg("weights"), py::arg("mask"), py::arg("probs"), py::arg("tokens"),
      py::arg("top_k"), py::arg("experts"), released);

  m.def(
      "widest_row",
      [](Address mask, std::int64_t tokens, std::int64_t experts) {
        return widest_row(at<const std::uint8_t>(mask), {tokens, 0, experts});
      },
      py::arg("mask"), py::arg("tokens"), py::arg("experts"), released);

  m.def(
      "pad_routing_map",
      [](Address out, Address mask, std::int64_t tokens, std::int64_t experts, std::int64_t multiple) {
        pad_routing_map(at<std::uint8_t>(out), at<const std::uint8_t>(mask), {tokens, 0, experts}, multiple);
      },
      py::arg("out"), py::arg("mask"), py::arg("tokens"), py::arg("experts"), py::arg("multiple"), released);
}

}  // namespace flexep
