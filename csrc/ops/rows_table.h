// The table through which rows_cpu.cpp reaches one instruction set's row kernels (rows_kernels.h).
#pragma once
#include <cstdint>

#include "base/dtype.h"

namespace flexep {

/// The terms of one output row, at least one, in the order of the sum.
struct Terms {
  const void* const* rows;   // [count]
  const float* weights;      // [count]
  const std::uint8_t* ends;  // [count], 1 where a group ends; null: no groups
  std::int64_t count;
  const void* const* next;  // rows to prefetch meanwhile, [next_count]
  std::int64_t next_count;
};

struct RowTable {
  /// `stream`: non-temporal stores, to be followed by one `fence` a thread. `next` (or null) is prefetched.
  void (*copy)(void* out, const void* src, const void* next, std::int64_t bytes, bool stream);
  void (*zero)(void* out, std::int64_t bytes, bool stream);
  void (*fence)();
  /// By dtype code (f32, f16, bf16).
  void (*scale[3])(void* out, const void* src, float weight, std::int64_t hidden, bool stream);
  float (*dot[3])(const void* a, const void* b, std::int64_t hidden);
  /// By input, then output dtype code.
  void (*reduce[3][3])(void* out, const Terms& terms, DType group_dtype, std::int64_t hidden, bool stream);
};

/// The table of the instruction set in use.
const RowTable& row_table();
/// Whether an output of so many rows leaves the caches before anybody reads it, so that it is written past them.
bool streams(const void* out, std::int64_t rows, std::int64_t row_bytes);

const RowTable& rows_portable();
#if defined(__x86_64__)
const RowTable& rows_avx2();
const RowTable& rows_avx512();
#endif

}  // namespace flexep
