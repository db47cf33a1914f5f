// See cuda_fp16.h.
#pragma once
#include <cstdint>

struct __nv_bfloat16 {
  std::uint16_t bits;
};
struct __nv_bfloat162 {
  std::uint32_t bits;
};
__nv_bfloat162 __floats2bfloat162_rn(float low, float high);
float __bfloat162float(__nv_bfloat16 x);
__nv_bfloat16 __float2bfloat16_rn(float x);
