// The row functors: gather, expand, reduce, dot. Every dispatcher and the permutation move rows with these
// alone.
//
// Rows are contiguous, row addresses and row bytes are multiples of their element (outputs: of 16 bytes), row
// strides of inputs are free. Arithmetic is fp32, products and sums round separately, results round once to
// nearest even; a NaN result is the canonical NaN of its type. Indices are checked by the caller
// (first_outside). Row counts are 64-bit, indices 32-bit.
#pragma once
#include <cstdint>

#include "base/dtype.h"

namespace flexep {

/// Rows of `hidden` elements of `dtype`, `stride` bytes apart.
struct RowsIn {
  const void* data;
  std::int64_t stride;
  DType dtype;
};

/// Position of the first of `values[0, count)` outside [low, high), or -1.
std::int64_t first_outside(const std::int32_t* values, std::int64_t count, std::int32_t low,
                           std::int32_t high);

/// out = values, narrowed; returns the position of the first of them outside [low, high), or -1.
std::int64_t narrow(std::int32_t* out, const std::int64_t* values, std::int64_t count, std::int32_t low,
                    std::int32_t high);

/// out[n] = src[idx[n]], a zero row where idx[n] is -1; with weights (fp32 [rows]) round(weights[n] *
/// src[idx[n]]). out: [rows, hidden] of src.dtype, dense.
void gather_rows(void* out, const RowsIn& src, const std::int32_t* idx, const float* weights,
                 std::int64_t rows, std::int64_t hidden, int threads);

/// The gather of a permutation, driven by its source so that each source row is read once: out[row_map[t, k]]
/// = src[t] (times weights[t, k]), and a zero row wherever row_src[row] is -1. Entries of row_map are
/// distinct or -1, and cover exactly the rows whose row_src is not -1.
void expand_rows(void* out, const RowsIn& src, const std::int32_t* row_map, const std::int32_t* row_src,
                 const float* weights, std::int64_t tokens, std::int64_t top_k, std::int64_t rows,
                 std::int64_t hidden, int threads);

struct ReduceArgs {
  RowsIn src;
  const std::int32_t* idx;     // [tokens, top_k], -1 is skipped
  const float* weights;        // [tokens, top_k] or null (all one)
  const std::int32_t* groups;  // [tokens, top_k] or null (one group, not rounded)
  DType group_dtype;           // what the sum of each run of equal groups is rounded to, if groups is set
  bool sort;                   // visit by ascending idx instead of ascending k
  std::int64_t tokens, top_k, hidden;
};

/// out[t] = sum of weights[t,k] * src[idx[t,k]], starting from the first visited term; no term gives +0.
/// out: [tokens, hidden] of out_dtype, dense.
void reduce_rows(void* out, DType out_dtype, const ReduceArgs& args, int threads);

/// out[m] = sum over h of a[m,h] * b[idx[m],h], 0 where idx[m] is -1. a.dtype == b.dtype.
/// Order: element h adds to lane h % 32, lanes start at +0; then lane i adds lane i + 16, + 8, + 4, + 2, + 1.
void dot_rows(float* out, const RowsIn& a, const RowsIn& b, const std::int32_t* idx, std::int64_t rows,
              std::int64_t hidden, int threads);

}  // namespace flexep
