#include "base/error.h"
#include "bind/bind.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "FlexEP's compiled part: raw pointers, sizes and strides come in. Import flexep instead.";
  pybind11::register_exception<flexep::Error>(m, "Error", PyExc_ValueError);
  pybind11::register_exception<flexep::NotBuilt>(m, "NotBuilt", PyExc_RuntimeError);
  flexep::bind_build_info(m);
  flexep::bind_plan(m);
  flexep::bind_ops(m);
  flexep::bind_maps(m);
  flexep::bind_route(m);
  flexep::bind_window(m);
  flexep::bind_device(m);
  flexep::bind_one_sided(m);
}
