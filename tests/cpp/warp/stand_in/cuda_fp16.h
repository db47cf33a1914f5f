// What the headers name of CUDA's vectors and halves. Only a store of zeros does something: no number is computed.
#pragma once
#include <algorithm>
#include <cstdint>

#include "warp/warp.h"

using std::min, std::max;

struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct float2 {
  float x, y;
};
uint2 make_uint2(unsigned x, unsigned y);
uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w);

template <class T>
T __ldg(const T* from);
template <class T>
void __stcs(T* to, const T& vector);
inline void __stcs(uint4* to, const uint4& vector) {
  if ((vector.x | vector.y | vector.z | vector.w) != 0) warp::fail("a vector is stored that is not zero");
  warp::cleared_vectors.push_back(reinterpret_cast<char*>(to));
}

struct __half {
  std::uint16_t bits;
};
struct __half2 {
  std::uint32_t bits;
};
float2 __half22float2(__half2 two);
__half2 __floats2half2_rn(float low, float high);
float __half2float(__half half);
__half __float2half_rn(float x);
unsigned __vmins2(unsigned a, unsigned b);
