#include <pybind11/stl.h>

#include <optional>

#include "bind/bind.h"
#include "ops/route.h"

namespace flexep {
namespace {

namespace py = pybind11;
using Stream = std::optional<std::uintptr_t>;  // None: run on the host now

}  // namespace

void bind_route(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> released;
  m.attr("route_max_top_k") = kRouteMaxTopK;
  m.attr("route_max_experts") = kRouteMaxExperts;

  py::class_<RouteRule>(m, "RouteRule", "How a router scores, chooses and weighs: csrc/ops/route.h.")
      .def(py::init([](int score, int top_k, int num_groups, int topk_groups, bool top2, bool renormalize,
                       float scaling) {
             return RouteRule{
                 static_cast<Score>(score), top_k, num_groups, topk_groups, top2, renormalize, scaling};
           }),
           py::arg("score"), py::arg("top_k"), py::arg("num_groups"), py::arg("topk_groups"), py::arg("top2"),
           py::arg("renormalize"), py::arg("scaling"));

  m.def(
      "route",
      [](const RouteRule& rule, Address logits, int dtype, Address bias, Address padding, std::int64_t tokens,
         int experts, Address ids, Address weights, Address probs, int threads, Stream stream) {
        const RouteArgs args{rule,
                             at<const void>(logits),
                             static_cast<DType>(dtype),
                             at<const float>(bias),
                             at<const std::uint8_t>(padding),
                             tokens,
                             experts,
                             at<std::int32_t>(ids),
                             at<float>(weights),
                             at<float>(probs)};
        stream ? launch_route(args, *stream) : route(args, threads);
      },
      py::arg("rule"), py::arg("logits"), py::arg("dtype"), py::arg("bias"), py::arg("padding"),
      py::arg("tokens"), py::arg("experts"), py::arg("ids"), py::arg("weights"), py::arg("probs"),
      py::arg("threads"), py::arg("stream"), released);

  m.def(
      "route_grad",
      [](const RouteRule& rule, Address logits, int dtype, Address ids, Address grad_weights,
         Address grad_probs, std::int64_t grad_probs_stride, std::int64_t tokens, int experts,
         Address grad_logits, int threads, Stream stream) {
        const RouteGradArgs args{rule,
                                 at<const void>(logits),
                                 static_cast<DType>(dtype),
                                 at<const std::int32_t>(ids),
                                 at<const float>(grad_weights),
                                 at<const float>(grad_probs),
                                 grad_probs_stride,
                                 tokens,
                                 experts,
                                 at<void>(grad_logits)};
        stream ? launch_route_grad(args, *stream) : route_grad(args, threads);
      },
      py::arg("rule"), py::arg("logits"), py::arg("dtype"), py::arg("ids"), py::arg("grad_weights"),
      py::arg("grad_probs"), py::arg("grad_probs_stride"), py::arg("tokens"), py::arg("experts"),
      py::arg("grad_logits"), py::arg("threads"), py::arg("stream"), released);
}

}  // namespace flexep
