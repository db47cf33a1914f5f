// Stands in for route.cu in a build without nvcc: every entry raises with the option to set.
#if !defined(FLEXEP_WITH_CUDA)
#include "base/error.h"
#include "ops/route.h"

namespace flexep {
namespace {

[[noreturn]] void refuse() {
  throw NotBuilt(
      "the router for CUDA tensors is not in this build; build with nvcc on PATH and -DFLEXEP_CUDA=ON");
}

}  // namespace

void launch_route(const RouteArgs&, std::uintptr_t) { refuse(); }
void launch_route_grad(const RouteGradArgs&, std::uintptr_t) { refuse(); }

}  // namespace flexep
#endif
