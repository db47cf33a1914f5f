// Stands in for rows_gather.cu, rows_reduce.cu, cast.cu and segments.cu in a build without nvcc: every entry raises with
// the option to set.
#if !defined(FLEXEP_WITH_CUDA)
#include "base/error.h"
#include "ops/cast.h"
#include "ops/rows_cuda.h"
#include "ops/segments.h"

namespace flexep {
namespace {

[[noreturn]] void not_built() {
  throw NotBuilt("rows of CUDA tensors are not in this build; build with nvcc on PATH and -DFLEXEP_CUDA=ON");
}

}  // namespace

void gather_rows_cuda(void*, const RowsIn&, std::int64_t, const std::int32_t*, const float*, std::int64_t,
                      std::int64_t, std::uintptr_t) {
  not_built();
}
void expand_rows_cuda(const ExpandArgs&, std::uintptr_t) { not_built(); }
void reduce_rows_cuda(void*, DType, const ReduceArgs&, std::int64_t, std::uintptr_t) { not_built(); }
void dot_rows_cuda(const DotArgs&, std::uintptr_t) { not_built(); }
void take_cuda(float*, const float*, std::int64_t, const std::int32_t*, std::int64_t, std::uintptr_t) {
  not_built();
}
void quantize_rows_cuda(const QuantizeArgs&, std::uintptr_t) { not_built(); }
void dequantize_rows_cuda(const DequantizeArgs&, std::uintptr_t) { not_built(); }
void segment_map_cuda(const SegmentArgs&, std::uintptr_t) { not_built(); }

}  // namespace flexep
#endif
