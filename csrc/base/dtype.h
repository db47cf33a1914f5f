// Element types and their conversions: round to nearest even, subnormals kept, every NaN becomes the one
// quiet NaN. Host and device. The vector paths of ops/ must give these bits.
#pragma once
#include <cstdint>
#include <cstring>

#include "base/hd.h"

namespace flexep {

// Always inlined, because translation units built for different instruction sets include this: an out-of-line
// copy from one of them could be the one the linker keeps for all.
#if defined(__CUDACC__)
#define FLEXEP_CONVERT FLEXEP_HD
#else
#define FLEXEP_CONVERT [[gnu::always_inline]] inline
#endif

/// Codes that cross the binding; python/flexep/_native/rows.py holds the same table.
enum class DType : int { f32 = 0, f16 = 1, bf16 = 2, u8 = 3 };

constexpr std::uint32_t kNanF32 = 0x7fc00000u;
constexpr std::uint16_t kNanF16 = 0x7e00u;
constexpr std::uint16_t kNanBF16 = 0x7fc0u;

FLEXEP_CONVERT std::uint32_t bits_of(float x) {
  std::uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}

FLEXEP_CONVERT float float_of(std::uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}

FLEXEP_CONVERT bool is_nan_bits(std::uint32_t u) { return (u & 0x7fffffffu) > 0x7f800000u; }

FLEXEP_CONVERT float canonical(float x) { return is_nan_bits(bits_of(x)) ? float_of(kNanF32) : x; }

FLEXEP_CONVERT float bf16_to_f32(std::uint16_t b) { return float_of(static_cast<std::uint32_t>(b) << 16); }

FLEXEP_CONVERT std::uint16_t f32_to_bf16(float x) {
  const std::uint32_t u = bits_of(x);
  if (is_nan_bits(u)) return kNanBF16;
  return static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

FLEXEP_CONVERT float f16_to_f32(std::uint16_t h) {
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000u) << 16;
  const std::uint32_t magnitude = h & 0x7fffu;
  if (magnitude > 0x7c00u) return float_of(kNanF32);
  if (magnitude == 0x7c00u) return float_of(sign | 0x7f800000u);
  // A subnormal half counts units of 2^-24, which a float holds exactly as a normal number.
  if (magnitude < 0x400u) return float_of(sign | bits_of(static_cast<float>(magnitude) * 0x1p-24f));
  return float_of(sign | ((magnitude << 13) + (112u << 23)));
}

FLEXEP_CONVERT std::uint16_t f32_to_f16(float x) {
  const std::uint32_t u = bits_of(x);
  const std::uint32_t sign = (u >> 16) & 0x8000u;
  std::uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return kNanF16;
  if (magnitude >= 0x477ff000u)
    return static_cast<std::uint16_t>(sign | 0x7c00u);  // 65520 and up round to infinity
  if (magnitude < 0x38800000u) {
    // Below 2^-14 the result is subnormal: adding 0.5 lets the float adder round to its unit, 2^-24.
    const std::uint32_t rounded = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    return static_cast<std::uint16_t>(sign | rounded);
  }
  magnitude += 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<std::uint16_t>(sign | ((magnitude - (112u << 23)) >> 13));
}

FLEXEP_CONVERT int size_of(DType t) { return t == DType::f32 ? 4 : t == DType::u8 ? 1 : 2; }

}  // namespace flexep
