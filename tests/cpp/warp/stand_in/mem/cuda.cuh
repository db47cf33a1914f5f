// What kernels/device_sums.cuh names of the memory. Its sums, which use it, are not run here.
#pragma once
#include "cuda_fp16.h"

namespace flexep::ptx {
template <class Vector>
void store_streaming_if(bool is, char* to, Vector vector);
}  // namespace flexep::ptx
