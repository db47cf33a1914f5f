// While an FpScope lives, this thread rounds to nearest even and keeps subnormals, whatever the caller had
// set (torch.set_flush_denormal, a library that left fast-math bits behind); results must not depend on it.
#pragma once
#include <cfenv>

namespace flexep {

class FpScope {
 public:
  FpScope() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);  // also clears the flush bits that live beside the rounding mode
  }
  ~FpScope() { std::fesetenv(&saved_); }
  FpScope(const FpScope&) = delete;
  FpScope& operator=(const FpScope&) = delete;

 private:
  std::fenv_t saved_;
};

}  // namespace flexep
