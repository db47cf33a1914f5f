#include "bind/bind.h"

namespace flexep {

void bind_plan(pybind11::module_&) {}

}  // namespace flexep
