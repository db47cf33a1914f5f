// The row functors of rows.h on the GPU, bit for bit the same: enqueued on a stream, no wait, no allocation, so that a
// graph can capture them. In a build without nvcc every entry throws NotBuilt (rows_stub.cpp).
//
// Unlike on the CPU, nobody has checked indices: one outside its range counts as -1. All row addresses and strides are
// multiples of 16 bytes, and so are the bytes of a row of the first input; `src_rows` and the like bound what is read.
// Inputs are read through the read-only cache: nothing may write them meanwhile.
#pragma once
#include <cstdint>

#include "ops/rows.h"

namespace flexep {

void gather_rows_cuda(void* out, const RowsIn& src, std::int64_t src_rows, const std::int32_t* idx,
                      const float* weights, std::int64_t rows, std::int64_t hidden, std::uintptr_t stream);

struct ExpandArgs {
  void* out;                    // [rows, hidden]
  RowsIn src;                   // [tokens, hidden]
  const std::int32_t* row_map;  // [tokens, top_k]
  const std::int32_t* row_src;  // [rows]
  const float* weights;         // [tokens, top_k]: what rows are multiplied by, or null
  // Carried to the rows along with the elements, +0 on padding; null is left out.
  const float* carried;  // [tokens, top_k] -> carried_out [rows]
  float* carried_out;
  const std::uint32_t* words;  // [tokens, words_a_row] -> words_out [rows, words_a_row]
  std::uint32_t* words_out;
  std::int64_t words_a_row;
  std::int64_t tokens, top_k, rows, hidden;
};

void expand_rows_cuda(const ExpandArgs& args, std::uintptr_t stream);

/// At most this many slots a token.
constexpr std::int64_t kMostTerms = 2048;

void reduce_rows_cuda(void* out, DType out_dtype, const ReduceArgs& args, std::int64_t src_rows,
                      std::uintptr_t stream);

/// out[m] = a[m / repeat] . b[idx[m]] for `count` of them; repeat 1 is dot_rows, repeat top_k a dot for every slot.
struct DotArgs {
  float* out;
  RowsIn a, b;
  std::int64_t b_rows;
  const std::int32_t* idx;
  std::int64_t count, repeat, hidden;
};

void dot_rows_cuda(const DotArgs& args, std::uintptr_t stream);

/// out[i] = values[index[i]], +0 where the index is none of [0, num_values).
void take_cuda(float* out, const float* values, std::int64_t num_values, const std::int32_t* index,
               std::int64_t count, std::uintptr_t stream);

}  // namespace flexep
