// What crossed between ranks, counted where it moves.
#pragma once
#include <cstdint>

#include "base/hd.h"

namespace flexep {

/// Rows and bytes that one lane moved between ranks, counted where they move; `rail` is the part between domains.
struct Moved {
  std::int64_t rows = 0, bytes = 0, rail_rows = 0, rail_bytes = 0;

  FLEXEP_HD void add(const Moved& other) {
    rows += other.rows, bytes += other.bytes;
    rail_rows += other.rail_rows, rail_bytes += other.rail_bytes;
  }
};

}  // namespace flexep
