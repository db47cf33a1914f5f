#include "bind/bind.h"
#include "ops/maps_cuda.h"

namespace py = pybind11;

namespace flexep {
namespace {}  // namespace

void bind_maps(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> released;
  m.attr("MAP_BANDS") = kMapBands;

  m.def(
      "indices_to_multihot_cuda",
      [](Address mask, Address probs, const Integers& idx, Address weights, std::int64_t tokens,
         std::int64_t top_k, std::int64_t experts, std::uintptr_t stream) {
        indices_to_multihot_cuda(at<std::uint8_t>(mask), at<float>(probs), idx, at<const float>(weights),
                                 {tokens, top_k, experts}, stream);
      },
      py::kw_only(), py::arg("mask"), py::arg("probs"), py::arg("idx"), py::arg("weights"), py::arg("tokens"),
      py::arg("top_k"), py::arg("experts"), py::arg("stream"), released);

  m.def(
      "multihot_to_indices_cuda",
      [](Address idx, Address mask, std::int64_t tokens, std::int64_t top_k, std::int64_t experts,
         std::uintptr_t stream) {
        multihot_to_indices_cuda(at<std::int32_t>(idx), at<const std::uint8_t>(mask),
                                 {tokens, top_k, experts}, stream);
      },
      py::kw_only(), py::arg("idx"), py::arg("mask"), py::arg("tokens"), py::arg("top_k"), py::arg("experts"),
      py::arg("stream"), released);

  m.def(
      "take_columns_cuda",
      [](Address out, Address values, const Integers& idx, std::int64_t tokens, std::int64_t top_k,
         std::int64_t experts, std::uintptr_t stream) {
        take_columns_cuda(at<float>(out), at<const float>(values), idx, {tokens, top_k, experts}, stream);
      },
      py::kw_only(), py::arg("out"), py::arg("values"), py::arg("idx"), py::arg("tokens"), py::arg("top_k"),
      py::arg("experts"), py::arg("stream"), released);

  m.def(
      "pad_routing_map_cuda",
      [](Address out, Address mask, Address counts, std::int64_t tokens, std::int64_t experts,
         std::int64_t multiple, std::uintptr_t stream) {
        pad_routing_map_cuda(at<std::uint8_t>(out), at<const std::uint8_t>(mask), at<std::int32_t>(counts),
                             {tokens, 0, experts}, multiple, stream);
      },
      py::kw_only(), py::arg("out"), py::arg("mask"), py::arg("counts"), py::arg("tokens"),
      py::arg("experts"), py::arg("multiple"), py::arg("stream"), released);
}

}  // namespace flexep
