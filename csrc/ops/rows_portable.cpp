// Row kernels in plain C++: every processor, and the specification of the other two.
#include "ops/rows_kernels.h"

namespace flexep {
namespace {

struct Wide {
  static constexpr int W = 8, kBlock = 4;
  using Bf16 = Wide;
  float x[W];

  template <class F>
  static Wide make(F f) {
    Wide r;
    for (int i = 0; i < W; ++i) r.x[i] = f(i);
    return r;
  }
  static Wide zero() { return set(0.0f); }
  static Wide set(float x) {
    return make([&](int) { return x; });
  }
  static Wide load(const float* p) {
    return make([&](int i) { return p[i]; });
  }
  static Wide load_f16(const std::uint16_t* p) {
    return make([&](int i) { return f16_to_f32(p[i]); });
  }
  static Wide load_bf16(const std::uint16_t* p) {
    return make([&](int i) { return bf16_to_f32(p[i]); });
  }
  static Wide mul(const Wide& a, const Wide& b) {
    return make([&](int i) { return a.x[i] * b.x[i]; });
  }
  static Wide add(const Wide& a, const Wide& b) {
    return make([&](int i) { return a.x[i] + b.x[i]; });
  }
  static Wide round_f16(const Wide& a) {
    return make([&](int i) { return f16_to_f32(f32_to_f16(a.x[i])); });
  }
  static Wide round_bf16(const Wide& a) {
    return make([&](int i) { return bf16_to_f32(f32_to_bf16(a.x[i])); });
  }
  template <bool kStream>
  static void store(float* p, const Wide& a) {
    for (int i = 0; i < W; ++i) p[i] = canonical(a.x[i]);
  }
  template <bool kStream>
  static void store_f16(std::uint16_t* p, const Wide& a) {
    for (int i = 0; i < W; ++i) p[i] = f32_to_f16(a.x[i]);
  }
  template <bool kStream>
  static void store_bf16(std::uint16_t* p, const Wide& a) {
    for (int i = 0; i < W; ++i) p[i] = f32_to_bf16(a.x[i]);
  }
};

struct Copy {
  static void copy(void* out, const void* src, const void*, std::int64_t bytes, bool) {
    std::memcpy(out, src, bytes);
  }
  static void zero(void* out, std::int64_t bytes, bool) { std::memset(out, 0, bytes); }
  static void fence() {}
};

constexpr RowTable kTable = make_table<Wide, Copy>();

}  // namespace

const RowTable& rows_portable() { return kTable; }

}  // namespace flexep
