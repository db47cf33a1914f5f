// What initcheck of compute-sanitizer makes of bulk stores: nothing uninitialized is read here, and it reports the reader.
//
//   nvcc -std=c++20 -arch=sm_90a -Icsrc tests/gpu/initcheck_bulk.cu -o initcheck_bulk
//   compute-sanitizer --tool initcheck ./initcheck_bulk
#include <cstdio>

#include "mem/cuda.cuh"

namespace ptx = flexep::ptx;

constexpr int kVectors = 128, kBytes = kVectors * 16;

__global__ void store(int4* to) {
  __shared__ __align__(128) int4 stage[kVectors];
  stage[threadIdx.x] = make_int4(1, 2, 3, 4);
  ptx::fence_proxy_async_shared_cta();
  __syncthreads();
  if (threadIdx.x != 0) return;
  ptx::bulk_store(to, stage, kBytes);
  ptx::bulk_commit_group();
  ptx::bulk_wait_group<0>();
}

__global__ void read(const int4* from, int* sums) {
  const int4 v = from[threadIdx.x];
  sums[threadIdx.x] = v.x + v.y + v.z + v.w;
}

int main() {
  int4* rows;
  int* sums;
  cudaMalloc(&rows, kBytes);
  cudaMalloc(&sums, kVectors * sizeof(int));
  store<<<1, kVectors>>>(rows);
  read<<<1, kVectors>>>(rows, sums);
  int found[kVectors];
  const cudaError_t error = cudaMemcpy(found, sums, sizeof found, cudaMemcpyDeviceToHost);
  int wrong = 0;
  for (const int sum : found) wrong += sum != 10;
  std::printf("%d of %d sums are wrong: %s\n", wrong, kVectors, cudaGetErrorString(error));
  return wrong != 0 || error != cudaSuccess;
}
