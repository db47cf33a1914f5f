// Integer helpers shared by host and device.
#pragma once
#include <cstdint>

#include "base/hd.h"

namespace flexep {

template <class T>
FLEXEP_HD constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

/// The smallest multiple of `alignment` that is >= a; align_up(0, x) == 0.
template <class T>
FLEXEP_HD constexpr T align_up(T a, T alignment) {
  return ceil_div(a, alignment) * alignment;
}

}  // namespace flexep
