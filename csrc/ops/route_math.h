// Scores and their order, from IEEE operations alone (no libm, no fused multiply-add), so that a CPU, a GPU and the
// composition in python/flexep/moe/fixed_math.py give the same bits. exp is within 1 ulp, log1p within 2.
#pragma once
#include <cmath>
#include <cstdint>

#include "base/dtype.h"
#include "ops/route.h"

namespace flexep {

/// Added to a sum of scores before dividing by it.
inline constexpr float kRouteEpsilon = 1e-20f;
/// Below, sqrt(softplus(x)) is exp(x / 2) to fp32 precision, and its slope cannot be 0 * inf.
inline constexpr float kSoftplusTail = -16.0f;

FLEXEP_CONVERT float power_of_two(int n) { return float_of(static_cast<std::uint32_t>(n + 127) << 23); }

FLEXEP_CONVERT float exp_fixed(float x) {
  const float c = x > 88.8f     ? 88.8f
                  : x > -105.0f ? x
                                : -105.0f;  // outside it is inf or 0; NaN becomes a number
  const float n = (c * 1.44269504f + 12582912.0f) - 12582912.0f;  // to the nearest integer
  const float r = (c - n * 0.693359375f) - n * -2.12194440e-4f;  // the first product and difference are exact
  float q = 1.9875691500e-4f;
  q = q * r + 1.3981999507e-3f;
  q = q * r + 8.3334519073e-3f;
  q = q * r + 4.1665795894e-2f;
  q = q * r + 1.6666665459e-1f;
  q = q * r + 5.0000001201e-1f;
  const float y = (q * (r * r) + r) + 1.0f;
  const int power = static_cast<int>(n), half = power >> 1;
  const float scaled =
      y * power_of_two(half) * power_of_two(power - half);  // in two, for subnormals and 2^128
  return x != x ? x : scaled;
}

/// log(1 + t) for t in [0, 1]: 2 atanh(t / (2 + t)).
FLEXEP_CONVERT float log1p_fixed(float t) {
  const float s = t / (t + 2.0f), z = s * s, twice = s + s;
  float q = 0x1.f1aee8p-4f;
  q = q * z + 0x1.b6d6a2p-4f;
  q = q * z + 0x1.250972p-3f;
  q = q * z + 0x1.9996a8p-3f;
  q = q * z + 0x1.555558p-2f;
  return twice + twice * (z * q);
}

FLEXEP_CONVERT float sigmoid_fixed(float x) { return 1.0f / (1.0f + exp_fixed(-x)); }

FLEXEP_CONVERT float sqrt_softplus_fixed(float x) {
  const float e = exp_fixed(x < kSoftplusTail ? x * 0.5f : x > 0.0f ? -x : x);
  if (x < kSoftplusTail) return e;
  const float above = x > 0.0f ? x : 0.0f;
  return std::sqrt(above + log1p_fixed(e));
}

/// The score of a logit by itself: sigmoid or sqrt_softplus.
FLEXEP_CONVERT float score_of(Score score, float logit) {
  return score == Score::sigmoid ? sigmoid_fixed(logit) : sqrt_softplus_fixed(logit);
}

/// The derivative of score_of, given its value.
FLEXEP_CONVERT float slope_of(Score score, float logit, float value) {
  if (score == Score::sigmoid) return value * (1.0f - value);
  if (logit < kSoftplusTail) return value * 0.5f;
  return sigmoid_fixed(logit) * 0.5f / value;
}

/// Unsigned integers in the order of floats: -0 is +0, NaN is the largest. Never 0, which stands for "taken".
FLEXEP_CONVERT std::uint32_t order_of(float x) {
  const std::uint32_t u = bits_of(x + 0.0f);
  if (is_nan_bits(u)) return 0xffffffffu;
  return u >> 31 ? ~u : u | 0x80000000u;
}

FLEXEP_CONVERT float of_order(std::uint32_t order) {
  if (order == 0xffffffffu) return float_of(kNanF32);
  return float_of(order >> 31 ? order & 0x7fffffffu : ~order);
}

/// The key of an expert whose group was not chosen.
inline constexpr std::uint32_t kOrderOut = 0x007fffffu;  // order_of(-inf)

FLEXEP_CONVERT float load_logit(const void* logits, DType dtype, std::int64_t at) {
  return dtype == DType::bf16 ? bf16_to_f32(static_cast<const std::uint16_t*>(logits)[at])
                              : static_cast<const float*>(logits)[at];
}

FLEXEP_CONVERT void store_logit(void* logits, DType dtype, std::int64_t at, float value) {
  if (dtype == DType::bf16)
    static_cast<std::uint16_t*>(logits)[at] = f32_to_bf16(value);
  else
    static_cast<float*>(logits)[at] = canonical(value);
}

}  // namespace flexep
