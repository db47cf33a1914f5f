// Row kernels for AVX-512 F, BW and VL (CMakeLists.txt compiles this file with those flags).
#if defined(__x86_64__)
#include <immintrin.h>

#include "ops/rows_kernels.h"

namespace flexep {
namespace {

struct Pairs;

struct Wide {
  static constexpr int W = 16, kBlock = 8;
  using Bf16 = Pairs;
  __m512 x;

  static Wide zero() { return {_mm512_setzero_ps()}; }
  static Wide set(float x) { return {_mm512_set1_ps(x)}; }
  static Wide load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Wide load_f16(const std::uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  static Wide load_bf16(const std::uint16_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
  }
  static Wide mul(Wide a, Wide b) { return {_mm512_mul_ps(a.x, b.x)}; }
  static Wide add(Wide a, Wide b) { return {_mm512_add_ps(a.x, b.x)}; }

  static __mmask16 nan_mask(Wide a) { return _mm512_cmp_ps_mask(a.x, a.x, _CMP_UNORD_Q); }
  static Wide canonical_nan(Wide a) {
    return {_mm512_mask_blend_ps(nan_mask(a), a.x, _mm512_castsi512_ps(_mm512_set1_epi32(kNanF32)))};
  }
  /// The upper half of each lane's bits is the rounded bf16, unless the lane is a NaN.
  static __m512i bf16_up(Wide a) {
    const __m512i u = _mm512_castps_si512(a.x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
  }
  static __m512i bf16_high(Wide a) { return bf16_up(canonical_nan(a)); }
  static Wide round_bf16(Wide a) {
    return {_mm512_castsi512_ps(
        _mm512_and_si512(bf16_high(a), _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
  }
  static __m256i f16_bits(Wide a) {
    return _mm512_cvtps_ph(canonical_nan(a).x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static Wide round_f16(Wide a) { return {_mm512_cvtph_ps(f16_bits(a))}; }

  template <bool kStream>
  static void put(void* p, __m128i bits) {
    if constexpr (kStream)
      _mm_stream_si128(static_cast<__m128i*>(p), bits);
    else
      _mm_storeu_si128(static_cast<__m128i*>(p), bits);
  }
  template <bool kStream>
  static void put(std::uint16_t* p, __m256i bits) {
    put<kStream>(p, _mm256_castsi256_si128(bits));
    put<kStream>(p + 8, _mm256_extracti128_si256(bits, 1));
  }
  template <bool kStream>
  static void store(float* p, Wide a) {
    const __m512i bits = _mm512_castps_si512(canonical_nan(a).x);
    put<kStream>(p, _mm512_extracti32x4_epi32(bits, 0));
    put<kStream>(p + 4, _mm512_extracti32x4_epi32(bits, 1));
    put<kStream>(p + 8, _mm512_extracti32x4_epi32(bits, 2));
    put<kStream>(p + 12, _mm512_extracti32x4_epi32(bits, 3));
  }
  template <bool kStream>
  static void store_f16(std::uint16_t* p, Wide a) {
    put<kStream>(p, f16_bits(a));
  }
  template <bool kStream>
  static void store_bf16(std::uint16_t* p, Wide a) {
    put<kStream>(p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(bf16_high(a), 16)));
  }
};

/// 32 floats whose bf16 lie side by side in memory: a shift and a mask part them, with no shuffle.
struct Pairs {
  static constexpr int W = 32, kBlock = 4;
  Wide even, odd;

  static __m512i upper() { return _mm512_set1_epi32(static_cast<int>(0xffff0000u)); }
  static Pairs zero() { return {Wide::zero(), Wide::zero()}; }
  static Pairs set(float x) { return {Wide::set(x), Wide::set(x)}; }
  static Pairs load_bf16(const std::uint16_t* p) {
    const __m512i both = _mm512_loadu_si512(p);
    return {{_mm512_castsi512_ps(_mm512_slli_epi32(both, 16))},
            {_mm512_castsi512_ps(_mm512_and_si512(both, upper()))}};
  }
  static Pairs mul(Pairs a, Pairs b) { return {Wide::mul(a.even, b.even), Wide::mul(a.odd, b.odd)}; }
  static Pairs add(Pairs a, Pairs b) { return {Wide::add(a.even, b.even), Wide::add(a.odd, b.odd)}; }
  static Pairs round_bf16(Pairs a) { return {Wide::round_bf16(a.even), Wide::round_bf16(a.odd)}; }
  static Pairs round_f16(Pairs a) { return {Wide::round_f16(a.even), Wide::round_f16(a.odd)}; }

  template <bool kStream>
  static void store_bf16(std::uint16_t* p, Pairs a) {
    // One comparison sees a NaN in either, and a canonical NaN survives the rounding.
    if (_mm512_cmp_ps_mask(a.even.x, a.odd.x, _CMP_UNORD_Q))
      a = {Wide::canonical_nan(a.even), Wide::canonical_nan(a.odd)};
    const __m512i low = _mm512_srli_epi32(Wide::bf16_up(a.even), 16), high = Wide::bf16_up(a.odd);
    const __m512i bits = _mm512_mask_blend_epi16(0xaaaaaaaau, low, high);
    Wide::put<kStream>(p, _mm512_castsi512_si256(bits));
    Wide::put<kStream>(p + 16, _mm512_extracti64x4_epi64(bits, 1));
  }
  template <bool kStream>
  static void store(float* p, Pairs a) {
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    Wide::store<kStream>(p, {_mm512_permutex2var_ps(a.even.x, first, a.odd.x)});
    Wide::store<kStream>(p + 16, {_mm512_permutex2var_ps(a.even.x, second, a.odd.x)});
  }
};

struct Copy {
  static void copy(void* out, const void* src, const void* next, std::int64_t bytes, bool stream) {
    auto* o = static_cast<char*>(out);
    const auto* s = static_cast<const char*>(src);
    if (!stream) {
      std::memcpy(o, s, bytes);
      return;
    }
    const auto* n = static_cast<const char*>(next ? next : src);
    std::int64_t i = 0;
    for (; i < bytes && reinterpret_cast<std::uintptr_t>(o + i) % 64 != 0; i += 16)
      Wide::put<true>(o + i, _mm_loadu_si128(reinterpret_cast<const __m128i*>(s + i)));
    for (; i + 64 <= bytes; i += 64) {
      _mm_prefetch(n + i, _MM_HINT_T0);
      _mm512_stream_si512(reinterpret_cast<__m512i*>(o + i), _mm512_loadu_si512(s + i));
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

const RowTable& rows_avx512() { return kTable; }

}  // namespace flexep
#endif
