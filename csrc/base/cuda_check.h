// The only header of base/ that knows CUDA; included by .cu files alone.
#pragma once
#include <cuda_runtime_api.h>

#include <string>

#include "base/error.h"

namespace flexep {

inline void cuda_check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw Error(std::string(what) + ": " + cudaGetErrorString(status));
}

}  // namespace flexep
