// One function per room; module.cpp calls them all. Nothing else lives in bind/.
#pragma once
#include <pybind11/pybind11.h>

namespace flexep {

void bind_build_info(pybind11::module_& m);
void bind_plan(pybind11::module_& m);
void bind_ops(pybind11::module_& m);
void bind_maps(pybind11::module_& m);
void bind_route(pybind11::module_& m);
void bind_window(pybind11::module_& m);
void bind_device(pybind11::module_& m);
void bind_one_sided(pybind11::module_& m);

}  // namespace flexep
