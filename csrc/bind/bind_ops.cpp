#include "bind/bind.h"

namespace flexep {

void bind_ops(pybind11::module_&) {}

}  // namespace flexep
