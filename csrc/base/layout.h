// Byte layouts from one cursor: a struct visits its fields once, and offsets and the total both come from that
// visit, so they cannot drift apart.
#pragma once
#include <cstddef>
#include <cstdint>

#include "base/hd.h"
#include "base/math.h"

namespace flexep {

/// `count` elements of T, beginning `at` bytes into some memory.
template <class T>
struct Span {
  std::size_t at = 0, count = 0;

  FLEXEP_HD constexpr std::size_t of(std::size_t i) const { return at + i * sizeof(T); }
  FLEXEP_HD constexpr std::size_t bytes() const { return count * sizeof(T); }
};

class Cursor {
 public:
  /// The next `count` elements of T, from a multiple of `align` bytes.
  template <class T>
  FLEXEP_HD constexpr Span<T> take(std::size_t count, std::size_t align = alignof(T)) {
    at_ = align_up(at_, align);
    const Span<T> span{at_, count};
    at_ += span.bytes();
    return span;
  }
  FLEXEP_HD constexpr std::size_t bytes(std::size_t align) const { return align_up(at_, align); }

 private:
  std::size_t at_ = 0;
};

}  // namespace flexep
