// Stands in for maps.cu in a build without nvcc: every entry raises with the option to set.
#if !defined(FLEXEP_WITH_CUDA)
#include "base/error.h"
#include "ops/maps_cuda.h"

namespace flexep {
namespace {

[[noreturn]] void not_built() {
  throw NotBuilt(
      "routing maps of CUDA tensors are not in this build; build with nvcc on PATH and -DFLEXEP_CUDA=ON");
}

}  // namespace

void indices_to_multihot_cuda(std::uint8_t*, float*, const Integers&, const float*, MapShape,
                              std::uintptr_t) {
  not_built();
}
void multihot_to_indices_cuda(std::int32_t*, const std::uint8_t*, MapShape, std::uintptr_t) { not_built(); }
void take_columns_cuda(float*, const float*, const Integers&, MapShape, std::uintptr_t) { not_built(); }
void pad_routing_map_cuda(std::uint8_t*, const std::uint8_t*, std::int32_t*, MapShape, std::int64_t,
                          std::uintptr_t) {
  not_built();
}

}  // namespace flexep
#endif
