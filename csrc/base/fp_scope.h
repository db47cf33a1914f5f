// While an FpScope lives, this thread rounds to nearest even and keeps subnormals, whatever the caller had
// set (torch.set_flush_denormal, a library that left fast-math bits behind); results must not depend on it.
#pragma once
#include <cstdint>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace flexep {

class FpScope {
 public:
  FpScope() : saved_(read()) { write(kDefault); }
  ~FpScope() { write(saved_); }
  FpScope(const FpScope&) = delete;
  FpScope& operator=(const FpScope&) = delete;

 private:
#if defined(__x86_64__)
  using Word = unsigned int;
  static constexpr Word kDefault = 0x1f80;  // MXCSR: all exceptions masked, nearest even, no FTZ, no DAZ
  static Word read() { return _mm_getcsr(); }
  static void write(Word word) { _mm_setcsr(word); }
#elif defined(__aarch64__)
  using Word = std::uint64_t;
  static constexpr Word kDefault = 0;  // FPCR
  static Word read() {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void write(Word word) { asm volatile("msr fpcr, %0" ::"r"(word)); }
#else
  using Word = int;
  static constexpr Word kDefault = 0;
  static Word read() { return 0; }
  static void write(Word) {}
#endif
  Word saved_;
};

}  // namespace flexep
