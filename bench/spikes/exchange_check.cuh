// Rows whose every word tells where it comes from, and the check that they came to the right place.
#pragma once
#include <cstddef>
#include <cstdint>

#include "exchange_kernel.cuh"

namespace flexep {

__device__ std::uint64_t value_of(std::uint32_t seed, int gpu, int row, int word) {
  std::uint64_t z = (static_cast<std::uint64_t>(seed) << 40) ^ (static_cast<std::uint64_t>(gpu) << 36) ^
                    (static_cast<std::uint64_t>(row) << 16) ^ static_cast<std::uint64_t>(word);
  z = (z + 0x9e3779b97f4a7c15ull) * 0xbf58476d1ce4e5b9ull;
  return z ^ (z >> 29);
}

__global__ void fill_rows(std::uint64_t* x, std::uint32_t seed, int gpu) {
  const int row = static_cast<int>(blockIdx.x);
  for (int w = static_cast<int>(threadIdx.x); w < kRowWords; w += static_cast<int>(blockDim.x))
    x[static_cast<std::size_t>(row) * kRowWords + w] = value_of(seed, gpu, row, w);
}

/// Counts the words of out that are not what they must be. `expected`: the peer's row in each row of out, -1: poison.
__global__ void check_rows(const std::uint64_t* out, const int* expected, std::uint32_t seed, int peer,
                           unsigned long long* wrong) {
  const int row = static_cast<int>(blockIdx.x), source = expected[row];
  unsigned long long count = 0;
  for (int w = static_cast<int>(threadIdx.x); w < kRowWords; w += static_cast<int>(blockDim.x)) {
    const std::uint64_t want = source < 0 ? kPoison * 0x0101010101010101ull : value_of(seed, peer, source, w);
    count += out[static_cast<std::size_t>(row) * kRowWords + w] != want;
  }
  if (count > 0) atomicAdd(wrong, count);
}

}  // namespace flexep
