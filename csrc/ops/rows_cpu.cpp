#include <algorithm>
#include <vector>

#include "base/isa.h"
#include "base/parallel.h"
#include "ops/rows.h"
#include "ops/rows_table.h"

namespace flexep {
namespace {

/// An output of this many bytes or more leaves the caches before anybody reads it, so it is written past
/// them: a plain store would first read the line that it overwrites. Short rows fill too few whole lines for
/// that to pay.
constexpr std::int64_t kStreamBytes = 16 << 20;
constexpr std::int64_t kStreamRowBytes = 512;

const char* row_of(const RowsIn& src, std::int64_t row) {
  return static_cast<const char*>(src.data) + row * src.stride;
}

template <class T>
std::int64_t find_outside(const T* values, std::int64_t count, T low, T high) {
  constexpr std::int64_t kBlock = 4096;  // a block is judged without a branch, then searched
  for (std::int64_t begin = 0; begin < count; begin += kBlock) {
    const std::int64_t end = std::min(count, begin + kBlock);
    bool bad = false;
    for (std::int64_t i = begin; i < end; ++i) bad |= (values[i] < low) | (values[i] >= high);
    if (bad)
      return std::find_if(values + begin, values + end, [=](T v) { return v < low || v >= high; }) - values;
  }
  return -1;
}

/// The terms of one token, in the order of the sum.
struct TermList {
  std::vector<const void*> rows;
  std::vector<float> weights;
  std::vector<std::uint8_t> ends;
  std::vector<std::int64_t> slots;

  explicit TermList(std::int64_t top_k) : rows(top_k), weights(top_k), ends(top_k) { slots.reserve(top_k); }

  void fill(const ReduceArgs& args, std::int64_t token) {
    const std::int64_t base = token * args.top_k;
    slots.clear();
    for (std::int64_t k = 0; k < args.top_k; ++k)
      if (args.idx[base + k] >= 0) slots.push_back(base + k);
    if (args.sort) sort_by_index(args.idx);
    const auto count = static_cast<std::int64_t>(slots.size());
    for (std::int64_t j = 0; j < count; ++j) {
      const std::int64_t slot = slots[j];
      rows[j] = row_of(args.src, args.idx[slot]);
      weights[j] = args.weights ? args.weights[slot]
                                : 1.0f;  // 1 * x is x: the unweighted sum needs no text of its own
      if (args.groups) ends[j] = j + 1 == count || args.groups[slot] != args.groups[slots[j + 1]];
    }
  }
  /// Insertion sort: top-k lists are short, and equal indices keep the order of k.
  void sort_by_index(const std::int32_t* idx) {
    for (std::size_t i = 1; i < slots.size(); ++i) {
      const std::int64_t slot = slots[i];
      std::size_t j = i;
      for (; j > 0 && idx[slots[j - 1]] > idx[slot]; --j) slots[j] = slots[j - 1];
      slots[j] = slot;
    }
  }
  std::int64_t count() const { return static_cast<std::int64_t>(slots.size()); }
};

}  // namespace

bool streams(const void* out, std::int64_t rows, std::int64_t row_bytes) {
  return rows * row_bytes >= kStreamBytes && row_bytes >= kStreamRowBytes && row_bytes % 16 == 0 &&
         reinterpret_cast<std::uintptr_t>(out) % 16 == 0;
}

const RowTable& row_table() {
#if defined(__x86_64__)
  if (current_isa() == Isa::avx512) return rows_avx512();
  if (current_isa() == Isa::avx2) return rows_avx2();
#endif
  return rows_portable();
}

std::int64_t first_outside(const std::int32_t* values, std::int64_t count, std::int32_t low,
                           std::int32_t high) {
  return find_outside(values, count, low, high);
}

std::int64_t narrow(std::int32_t* out, const std::int64_t* values, std::int64_t count, std::int32_t low,
                    std::int32_t high) {
  for (std::int64_t i = 0; i < count; ++i) out[i] = static_cast<std::int32_t>(values[i]);
  return find_outside<std::int64_t>(values, count, low, high);
}

void gather_rows(void* out, const RowsIn& src, const std::int32_t* idx, const float* weights,
                 std::int64_t rows, std::int64_t hidden, int threads) {
  const std::int64_t row_bytes = hidden * size_of(src.dtype);
  const bool stream = streams(out, rows, row_bytes);
  const RowTable& t = row_table();
  parallel_for(rows, 2 * rows * row_bytes, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t n = begin; n < end; ++n) {
      char* const to = static_cast<char*>(out) + n * row_bytes;
      const void* const next = n + 1 < end && idx[n + 1] >= 0 ? row_of(src, idx[n + 1]) : nullptr;
      if (idx[n] < 0)
        t.zero(to, row_bytes, stream);
      else if (weights)
        t.scale[static_cast<int>(src.dtype)](to, row_of(src, idx[n]), weights[n], hidden, stream);
      else
        t.copy(to, row_of(src, idx[n]), next, row_bytes, stream);
    }
    if (stream) t.fence();
  });
}

void expand_rows(void* out, const RowsIn& src, const std::int32_t* row_map, const std::int32_t* row_src,
                 const float* weights, std::int64_t tokens, std::int64_t top_k, std::int64_t rows,
                 std::int64_t hidden, int threads) {
  const std::int64_t row_bytes = hidden * size_of(src.dtype);
  const bool stream = streams(out, rows, row_bytes);
  const RowTable& t = row_table();
  const auto to = [&](std::int64_t row) { return static_cast<char*>(out) + row * row_bytes; };
  parallel_for(tokens, (rows + tokens) * row_bytes, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t n = begin; n < end; ++n) {
      const char* const from = row_of(src, n);
      const char* next = n + 1 < end ? row_of(src, n + 1) : nullptr;
      for (std::int64_t slot = n * top_k; slot < (n + 1) * top_k; ++slot) {
        if (row_map[slot] < 0) continue;
        if (weights)
          t.scale[static_cast<int>(src.dtype)](to(row_map[slot]), from, weights[slot], hidden, stream);
        else
          t.copy(to(row_map[slot]), from, next, row_bytes, stream);
        next = nullptr;  // fetched with the first copy
      }
    }
    if (stream) t.fence();
  });
  const std::int64_t padding = std::count(row_src, row_src + rows, -1);
  parallel_for(rows, padding * row_bytes, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row)
      if (row_src[row] < 0) t.zero(to(row), row_bytes, stream);
    if (stream) t.fence();
  });
}

void reduce_rows(void* out, DType out_dtype, const ReduceArgs& args, int threads) {
  const std::int64_t out_bytes = args.hidden * size_of(out_dtype);
  const std::int64_t src_bytes = args.hidden * size_of(args.src.dtype);
  const bool stream = streams(out, args.tokens, out_bytes);
  const RowTable& t = row_table();
  const auto reduce = t.reduce[static_cast<int>(args.src.dtype)][static_cast<int>(out_dtype)];
  const std::int64_t traffic = args.tokens * (args.top_k * src_bytes + out_bytes);
  parallel_for(args.tokens, traffic, threads, [&](std::int64_t begin, std::int64_t end) {
    TermList now(args.top_k), next(args.top_k);
    next.fill(args, begin);
    for (std::int64_t token = begin; token < end; ++token) {
      std::swap(now, next);
      if (token + 1 < end) next.fill(args, token + 1);
      char* const to = static_cast<char*>(out) + token * out_bytes;
      if (now.count() == 0) {
        t.zero(to, out_bytes, stream);
        continue;
      }
      const Terms terms{now.rows.data(), now.weights.data(), args.groups ? now.ends.data() : nullptr,
                        now.count(),     next.rows.data(),   token + 1 < end ? next.count() : 0};
      reduce(to, terms, args.group_dtype, args.hidden, stream);
    }
    if (stream) t.fence();
  });
}

void dot_rows(float* out, const RowsIn& a, const RowsIn& b, const std::int32_t* idx, std::int64_t rows,
              std::int64_t hidden, int threads) {
  const auto dot = row_table().dot[static_cast<int>(a.dtype)];
  parallel_for(rows, 2 * rows * hidden * size_of(a.dtype), threads,
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t m = begin; m < end; ++m)
                   out[m] = idx[m] < 0 ? 0.0f : dot(row_of(a, m), row_of(b, idx[m]), hidden);
               });
}

}  // namespace flexep
