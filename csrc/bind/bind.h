// One function per room; module.cpp calls them all. Nothing else lives in bind/ but how an address is read.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>

namespace flexep {

using Address = std::uintptr_t;  // 0 is "not given"
template <class T = std::int32_t>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

void bind_build_info(pybind11::module_& m);
void bind_plan(pybind11::module_& m);
void bind_ops(pybind11::module_& m);
void bind_maps(pybind11::module_& m);
void bind_route(pybind11::module_& m);
void bind_window(pybind11::module_& m);
void bind_device(pybind11::module_& m);
void bind_one_sided(pybind11::module_& m);

}  // namespace flexep
