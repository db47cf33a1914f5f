// The row kernels' one text, a template over a vector type `V` of `V::W` floats (rows_portable.cpp,
// rows_avx2.cpp, rows_avx512.cpp define it and include this). Everything has internal linkage, and nothing of
// the standard library's templates is used: those files are compiled for different instruction sets and must
// not share a symbol.
#pragma once
#include <cstdint>
#include <cstring>

#include "base/dtype.h"
#include "ops/rows_table.h"

#if defined(__clang__)
#define FLEXEP_UNROLL _Pragma("unroll")
#else
#define FLEXEP_UNROLL _Pragma("GCC unroll 8")
#endif

namespace flexep {
namespace {

/// One float at a time: the tail of a row that the wide vector does not divide.
struct Lane {
  static constexpr int W = 1;
  float x;
  static Lane zero() { return {0.0f}; }
  static Lane set(float x) { return {x}; }
  static Lane load(const float* p) { return {*p}; }
  static Lane load_f16(const std::uint16_t* p) { return {f16_to_f32(*p)}; }
  static Lane load_bf16(const std::uint16_t* p) { return {bf16_to_f32(*p)}; }
  static Lane mul(Lane a, Lane b) { return {a.x * b.x}; }
  static Lane add(Lane a, Lane b) { return {a.x + b.x}; }
  static Lane round_f16(Lane a) { return {f16_to_f32(f32_to_f16(a.x))}; }
  static Lane round_bf16(Lane a) { return {bf16_to_f32(f32_to_bf16(a.x))}; }
  template <bool kStream>
  static void store(float* p, Lane a) {
    *p = canonical(a.x);
  }
  template <bool kStream>
  static void store_f16(std::uint16_t* p, Lane a) {
    *p = f32_to_f16(a.x);
  }
  template <bool kStream>
  static void store_bf16(std::uint16_t* p, Lane a) {
    *p = f32_to_bf16(a.x);
  }
};

template <bool kFirst, class A, class B>
struct Choose {
  using Type = A;
};
template <class A, class B>
struct Choose<false, A, B> {
  using Type = B;
};

template <DType D>
struct Of {
  using Element = std::uint16_t;
};
template <>
struct Of<DType::f32> {
  using Element = float;
};

template <DType D, class V>
inline V load_as(const typename Of<D>::Element* p) {
  if constexpr (D == DType::f32)
    return V::load(p);
  else if constexpr (D == DType::f16)
    return V::load_f16(p);
  else
    return V::load_bf16(p);
}

template <DType D, class V, bool kStream>
inline void store_as(typename Of<D>::Element* p, V x) {
  if constexpr (D == DType::f32)
    V::template store<kStream>(p, x);
  else if constexpr (D == DType::f16)
    V::template store_f16<kStream>(p, x);
  else
    V::template store_bf16<kStream>(p, x);
}

template <class V>
inline V round_as(DType dtype, V x) {
  return dtype == DType::bf16 ? V::round_bf16(x) : dtype == DType::f16 ? V::round_f16(x) : x;
}

template <DType D, class V, bool kStream>
void scale_range(typename Of<D>::Element* out, const typename Of<D>::Element* src, float weight,
                 std::int64_t begin, std::int64_t end) {
  const V w = V::set(weight);
  for (std::int64_t h = begin; h < end; h += V::W)
    store_as<D, V, kStream>(out + h, V::mul(w, load_as<D, V>(src + h)));
}

template <DType D, class V>
void scale_row(void* out, const void* src, float weight, std::int64_t hidden, bool stream) {
  using Element = typename Of<D>::Element;
  using Wide = typename Choose<D == DType::bf16, typename V::Bf16, V>::Type;
  auto* o = static_cast<Element*>(out);
  const auto* s = static_cast<const Element*>(src);
  const std::int64_t wide = hidden / Wide::W * Wide::W;
  if (stream) {
    scale_range<D, Wide, true>(o, s, weight, 0, wide);
  } else {
    scale_range<D, Wide, false>(o, s, weight, 0, wide);
  }
  scale_range<D, Lane, false>(o, s, weight, wide, hidden);
}

/// kVectors * V::W columns of every term at once, so that a visit of a row takes whole cache lines. The sums
/// stay in registers: every loop over `v` is unrolled, and the first term is peeled instead of tested for.
template <DType In, DType Out, class V, int kVectors, bool kGroups, bool kStream>
inline void reduce_block(typename Of<Out>::Element* out, const Terms& terms, DType group_dtype,
                         std::int64_t h) {
  using Element = typename Of<In>::Element;
  const auto term = [&](std::int64_t j, int v) {
    return V::mul(V::set(terms.weights[j]),
                  load_as<In, V>(static_cast<const Element*>(terms.rows[j]) + h + v * V::W));
  };
  V total[kVectors], sum[kVectors];
  std::int64_t j = 0;
  do {  // there is at least one term
    const bool first_group = j == 0;
    FLEXEP_UNROLL for (int v = 0; v < kVectors; ++v) sum[v] = term(j, v);
    for (++j; j < terms.count && !(kGroups && terms.ends[j - 1]); ++j)
      FLEXEP_UNROLL for (int v = 0; v < kVectors; ++v) sum[v] = V::add(sum[v], term(j, v));
    if constexpr (kGroups) {
      FLEXEP_UNROLL for (int v = 0; v < kVectors; ++v) {
        const V part = round_as(group_dtype, sum[v]);
        total[v] = first_group ? part : V::add(total[v], part);
      }
    }
  } while (j < terms.count);
  FLEXEP_UNROLL for (int v = 0; v < kVectors; ++v)
      store_as<Out, V, kStream>(out + h + v * V::W, kGroups ? total[v] : sum[v]);
}

template <DType In, DType Out, class V, class Rest, bool kGroups, bool kStream>
void reduce_range(typename Of<Out>::Element* out, const Terms& terms, DType group_dtype,
                  std::int64_t hidden) {
  using Element = typename Of<In>::Element;
  constexpr int kVectors = kGroups ? V::kBlock / 2 : V::kBlock;  // groups need a second set of registers
  constexpr std::int64_t kColumns = kVectors * V::W;
  std::int64_t h = 0;
  for (; h + kColumns <= hidden; h += kColumns) {
    // Into the second cache level: the next token's rows, all together, would not fit the first.
    for (std::int64_t j = 0; j < terms.next_count; ++j)
      for (std::int64_t line = 0; line < kColumns; line += 64 / sizeof(Element))
        __builtin_prefetch(static_cast<const Element*>(terms.next[j]) + h + line, 0, 2);
    reduce_block<In, Out, V, kVectors, kGroups, kStream>(out, terms, group_dtype, h);
  }
  for (; h + Rest::W <= hidden; h += Rest::W)
    reduce_block<In, Out, Rest, 1, kGroups, kStream>(out, terms, group_dtype, h);
  for (; h < hidden; ++h) reduce_block<In, Out, Lane, 1, kGroups, false>(out, terms, group_dtype, h);
}

template <DType In, DType Out, class V>
void reduce_row(void* out, const Terms& terms, DType group_dtype, std::int64_t hidden, bool stream) {
  using Wide = typename Choose<In == DType::bf16 && Out != DType::f16, typename V::Bf16, V>::Type;
  auto* o = static_cast<typename Of<Out>::Element*>(out);
  if (terms.ends && stream)
    reduce_range<In, Out, Wide, V, true, true>(o, terms, group_dtype, hidden);
  else if (terms.ends)
    reduce_range<In, Out, Wide, V, true, false>(o, terms, group_dtype, hidden);
  else if (stream)
    reduce_range<In, Out, Wide, V, false, true>(o, terms, group_dtype, hidden);
  else
    reduce_range<In, Out, Wide, V, false, false>(o, terms, group_dtype, hidden);
}

constexpr int kDotLanes = 32;  // part of the contract in rows.h, on every instruction set

template <DType D, class V>
float dot_row(const void* a, const void* b, std::int64_t hidden) {
  using Element = typename Of<D>::Element;
  using Wide = typename Choose<D == DType::bf16, typename V::Bf16, V>::Type;
  constexpr int kVectors = kDotLanes / Wide::W;
  const auto* x = static_cast<const Element*>(a);
  const auto* y = static_cast<const Element*>(b);
  Wide sum[kVectors];
  for (int v = 0; v < kVectors; ++v) sum[v] = Wide::zero();
  std::int64_t h = 0;
  for (; h + kDotLanes <= hidden; h += kDotLanes)
    for (int v = 0; v < kVectors; ++v)
      sum[v] = Wide::add(
          sum[v], Wide::mul(load_as<D, Wide>(x + h + v * Wide::W), load_as<D, Wide>(y + h + v * Wide::W)));
  float lanes[kDotLanes];
  for (int v = 0; v < kVectors; ++v) Wide::template store<false>(lanes + v * Wide::W, sum[v]);
  for (; h < hidden; ++h) lanes[h % kDotLanes] += load_as<D, Lane>(x + h).x * load_as<D, Lane>(y + h).x;
  for (int half = kDotLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return canonical(lanes[0]);
}

/// `Copy` holds the instruction set's copy, zero and fence.
template <class V, class Copy>
constexpr RowTable make_table() {
  constexpr DType f32 = DType::f32, f16 = DType::f16, bf16 = DType::bf16;
  return {Copy::copy,
          Copy::zero,
          Copy::fence,
          {scale_row<f32, V>, scale_row<f16, V>, scale_row<bf16, V>},
          {dot_row<f32, V>, dot_row<f16, V>, dot_row<bf16, V>},
          {{reduce_row<f32, f32, V>, reduce_row<f32, f16, V>, reduce_row<f32, bf16, V>},
           {reduce_row<f16, f32, V>, reduce_row<f16, f16, V>, reduce_row<f16, bf16, V>},
           {reduce_row<bf16, f32, V>, reduce_row<bf16, f16, V>, reduce_row<bf16, bf16, V>}}};
}

}  // namespace
}  // namespace flexep
