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

/// x, or c where x is smaller or NaN.
FLEXEP_CONVERT float at_least(float x, float c) {
#if defined(__CUDA_ARCH__)
  return fmaxf(x, c);
#else
  return x > c ? x : c;
#endif
}

/// x, or c where x is larger or NaN.
FLEXEP_CONVERT float at_most(float x, float c) {
#if defined(__CUDA_ARCH__)
  return fminf(x, c);
#else
  return x < c ? x : c;
#endif
}

/// e^x of a number between -105 and 88.8, as 2^n times a polynomial: first times 2^(n + kStep), which must be exact,
/// then times 2^-kStep, which rounds a subnormal once. No branch, so that a GPU works on several at a time.
template <int kStep>
FLEXEP_CONVERT float exp_within(float x) {
  const float shifted = x * 1.44269504f + 12582912.0f;  // its low bits are n, the nearest integer
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;  // the first product and difference are exact
  float q = 1.9875691500e-4f;
  q = q * r + 1.3981999507e-3f;
  q = q * r + 8.3334519073e-3f;
  q = q * r + 4.1665795894e-2f;
  q = q * r + 1.6666665459e-1f;
  q = q * r + 5.0000001201e-1f;
  const float y = (q * (r * r) + r) + 1.0f;
  constexpr auto kRaise = static_cast<std::uint32_t>(kStep) << 23;
  return float_of(bits_of(y) + (bits_of(shifted) << 23) + kRaise) * (kStep > 0 ? 0x1p-64f : 0x1p64f);
}

/// e^x for x <= 0; 0 for NaN.
FLEXEP_CONVERT float exp_falling_number(float x) { return exp_within<64>(at_least(x, -105.0f)); }

/// e^x for x <= 0, or NaN.
FLEXEP_CONVERT float exp_falling(float x) {
  const float y = exp_falling_number(x);
  return x != x ? x : y;
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

/// 1 / x for x from 1 to 2^125, without the branch by which a GPU's division looks for subnormal quotients: a branch
/// keeps it from working on several at a time.
FLEXEP_CONVERT float reciprocal_within(float x) {
#if defined(__CUDA_ARCH__)
  const float near = __fdividef(1.0f, x);  // within 1 ulp, which this step rounds as IEEE division does
  return __fmaf_rn(near, __fmaf_rn(-x, near, 1.0f), near);
#else
  return 1.0f / x;
#endif
}

/// From here on reciprocal_within serves a sigmoid: e^86 < 2^125.
inline constexpr float kSigmoidTail = -86.0f;

/// 1 / (1 + e^-x). Beside 1, e^-40 is nothing. kTail: x may be below kSigmoidTail.
template <bool kTail = true>
FLEXEP_CONVERT float sigmoid_fixed(float x) {
  const float below = 1.0f + exp_within<-64>(at_least(at_most(-x, 88.8f), -40.0f));
  const float y = kTail ? 1.0f / below : reciprocal_within(below);
  return x != x ? x : y;
}

FLEXEP_CONVERT float sqrt_softplus_fixed(float x) {
  const float e = exp_falling(x < kSoftplusTail ? x * 0.5f : x > 0.0f ? -x : x);
  const float body = std::sqrt((x > 0.0f ? x : 0.0f) + log1p_fixed(e));
  return x < kSoftplusTail ? e : body;
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
#if !defined(__CUDA_ARCH__)  // a GPU's sum is never another NaN than 0x7fffffff
  if (is_nan_bits(u)) return 0xffffffffu;
#endif
  return u ^ (static_cast<std::uint32_t>(static_cast<std::int32_t>(u) >> 31) | 0x80000000u);
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
