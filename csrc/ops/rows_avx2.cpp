// Row kernels for AVX2 with F16C (CMakeLists.txt compiles this file with -mavx2 -mf16c).
#if defined(__x86_64__)
#include <immintrin.h>

#include "ops/rows_kernels.h"

namespace flexep {
namespace {

struct Pairs;

struct Wide {
  static constexpr int W = 8, kBlock = 8;
  using Bf16 = Pairs;
  __m256 x;

  static Wide zero() { return {_mm256_setzero_ps()}; }
  static Wide set(float x) { return {_mm256_set1_ps(x)}; }
  static Wide load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Wide load_f16(const std::uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }
  static Wide load_bf16(const std::uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
  }
  static Wide mul(Wide a, Wide b) { return {_mm256_mul_ps(a.x, b.x)}; }
  static Wide add(Wide a, Wide b) { return {_mm256_add_ps(a.x, b.x)}; }

  static __m256 nan_mask(Wide a) { return _mm256_cmp_ps(a.x, a.x, _CMP_UNORD_Q); }
  static Wide canonical_nan(Wide a) {
    return {_mm256_blendv_ps(a.x, _mm256_castsi256_ps(_mm256_set1_epi32(kNanF32)), nan_mask(a))};
  }
  /// The upper half of each lane's bits is the rounded bf16, unless the lane is a NaN.
  static __m256i bf16_up(Wide a) {
    const __m256i u = _mm256_castps_si256(a.x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
  }
  static __m256i bf16_high(Wide a) { return bf16_up(canonical_nan(a)); }
  static Wide round_bf16(Wide a) {
    return {_mm256_castsi256_ps(
        _mm256_and_si256(bf16_high(a), _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
  }
  static __m128i f16_bits(Wide a) {
    return _mm256_cvtps_ph(canonical_nan(a).x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static Wide round_f16(Wide a) { return {_mm256_cvtph_ps(f16_bits(a))}; }

  template <bool kStream>
  static void put(void* p, __m128i bits) {
    if constexpr (kStream)
      _mm_stream_si128(static_cast<__m128i*>(p), bits);
    else
      _mm_storeu_si128(static_cast<__m128i*>(p), bits);
  }
  template <bool kStream>
  static void store(float* p, Wide a) {
    const __m256i bits = _mm256_castps_si256(canonical_nan(a).x);
    put<kStream>(p, _mm256_castsi256_si128(bits));
    put<kStream>(p + 4, _mm256_extracti128_si256(bits, 1));
  }
  template <bool kStream>
  static void store_f16(std::uint16_t* p, Wide a) {
    put<kStream>(p, f16_bits(a));
  }
  template <bool kStream>
  static void store_bf16(std::uint16_t* p, Wide a) {
    const __m256i low = _mm256_srli_epi32(bf16_high(a), 16);
    put<kStream>(p, _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
  }
};

/// 16 floats whose bf16 lie side by side in memory: a shift and a mask part them, with no shuffle.
struct Pairs {
  static constexpr int W = 16, kBlock = 4;
  Wide even, odd;

  static __m256i upper() { return _mm256_set1_epi32(static_cast<int>(0xffff0000u)); }
  static Pairs zero() { return {Wide::zero(), Wide::zero()}; }
  static Pairs set(float x) { return {Wide::set(x), Wide::set(x)}; }
  static Pairs load_bf16(const std::uint16_t* p) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {{_mm256_castsi256_ps(_mm256_slli_epi32(both, 16))},
            {_mm256_castsi256_ps(_mm256_and_si256(both, upper()))}};
  }
  static Pairs mul(Pairs a, Pairs b) { return {Wide::mul(a.even, b.even), Wide::mul(a.odd, b.odd)}; }
  static Pairs add(Pairs a, Pairs b) { return {Wide::add(a.even, b.even), Wide::add(a.odd, b.odd)}; }
  static Pairs round_bf16(Pairs a) { return {Wide::round_bf16(a.even), Wide::round_bf16(a.odd)}; }
  static Pairs round_f16(Pairs a) { return {Wide::round_f16(a.even), Wide::round_f16(a.odd)}; }

  template <bool kStream>
  static void store_bf16(std::uint16_t* p, Pairs a) {
    // One comparison sees a NaN in either, and a canonical NaN survives the rounding.
    if (_mm256_movemask_ps(_mm256_cmp_ps(a.even.x, a.odd.x, _CMP_UNORD_Q)))
      a = {Wide::canonical_nan(a.even), Wide::canonical_nan(a.odd)};
    const __m256i low = _mm256_srli_epi32(Wide::bf16_up(a.even), 16), high = Wide::bf16_up(a.odd);
    const __m256i bits = _mm256_blend_epi16(low, high, 0xaa);
    Wide::put<kStream>(p, _mm256_castsi256_si128(bits));
    Wide::put<kStream>(p + 8, _mm256_extracti128_si256(bits, 1));
  }
  template <bool kStream>
  static void store(float* p, Pairs a) {
    // Interleaving works within 128-bit halves: elements 0-3 and 8-11, then 4-7 and 12-15.
    const __m256 a03_8b = _mm256_unpacklo_ps(a.even.x, a.odd.x),
                 a47_cf = _mm256_unpackhi_ps(a.even.x, a.odd.x);
    Wide::store<kStream>(p, {_mm256_permute2f128_ps(a03_8b, a47_cf, 0x20)});
    Wide::store<kStream>(p + 8, {_mm256_permute2f128_ps(a03_8b, a47_cf, 0x31)});
  }
};

struct Copy {
  static __m256i load(const char* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

  static void copy(void* out, const void* src, const void* next, std::int64_t bytes, bool stream) {
    auto* o = static_cast<char*>(out);
    const auto* s = static_cast<const char*>(src);
    if (!stream) {
      std::memcpy(o, s, bytes);
      return;
    }
    const auto* n = static_cast<const char*>(next ? next : src);
    std::int64_t i = 0;
    if (reinterpret_cast<std::uintptr_t>(o) % 32 != 0) {
      Wide::put<true>(o, _mm_loadu_si128(reinterpret_cast<const __m128i*>(s)));
      i = 16;
    }
    for (; i + 64 <= bytes; i += 64) {
      _mm_prefetch(n + i, _MM_HINT_T0);
      const __m256i low = load(s + i), high = load(s + i + 32);
      _mm256_stream_si256(reinterpret_cast<__m256i*>(o + i), low);
      _mm256_stream_si256(reinterpret_cast<__m256i*>(o + i + 32), high);
    }
    for (; i < bytes; i += 16)
      Wide::put<true>(o + i, _mm_loadu_si128(reinterpret_cast<const __m128i*>(s + i)));
  }

  static void zero(void* out, std::int64_t bytes, bool stream) {
    auto* o = static_cast<char*>(out);
    if (!stream) {
      std::memset(o, 0, bytes);
      return;
    }
    for (std::int64_t i = 0; i < bytes; i += 16) Wide::put<true>(o + i, _mm_setzero_si128());
  }

  static void fence() { _mm_sfence(); }
};

constexpr RowTable kTable = make_table<Wide, Copy>();

}  // namespace

const RowTable& rows_avx2() { return kTable; }

}  // namespace flexep
#endif
