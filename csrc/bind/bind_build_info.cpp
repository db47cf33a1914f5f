#include "bind/bind.h"

namespace flexep {

void bind_build_info(pybind11::module_& m) {
#if defined(FLEXEP_WITH_CUDA)
  m.attr("cuda_archs") = FLEXEP_CUDA_ARCHS;
#else
  m.attr("cuda_archs") = "";
#endif
}

}  // namespace flexep
