// What callers bring as int32 or int64 and the plan reads as it is.
#pragma once
#include <cstdint>

#include "base/hd.h"

namespace flexep {

/// int32 or int64 values, read as int64.
struct Integers {
  const void* values;
  bool wide;
  FLEXEP_HD int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(values)[i] : static_cast<const int32_t*>(values)[i];
  }
};

}  // namespace flexep
