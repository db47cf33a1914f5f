// Kernels of gather_rows and expand_rows: rows that are copied, or scaled.
#pragma once
#include "ops/rows_vector.cuh"

namespace flexep {

constexpr int kVectorsAtOnce = 4;                // of a lane, loaded before the first is stored
constexpr int kGatherCtas = 5, kExpandCtas = 4;  // of one SM

/// A vector of D times `weight`; u8 stands for rows of any dtype that are copied.
template <DType D>
__device__ __forceinline__ void store_scaled(char* row, int column, const uint4& vector, float weight) {
  if constexpr (D == DType::u8) {
    store_vector(row, column, vector);
  } else {
    float x[kVector<D>];
    widen<D>(x, vector);
#pragma unroll
    for (int i = 0; i < kVector<D>; ++i) x[i] = weight * x[i];
    store_packed(row, column, round_to<D>(x));
  }
}

/// Device side of gather_rows_cuda. `columns`: vectors of a row. `tile`: rows that a CTA takes at once.
struct GatherTask {
  char* out;
  RowsAt src;
  const std::int32_t* idx;
  const float* weights;
  std::int64_t rows;
  int columns, tile;
};

template <DType D>
__global__ void __launch_bounds__(kRowThreads, kGatherCtas) gather_kernel(const GatherTask task) {
  constexpr int n = kVectorsAtOnce;
  const std::int64_t row_bytes = static_cast<std::int64_t>(task.columns) * kVectorBytes;
  for (std::int64_t first = blockIdx.x * static_cast<std::int64_t>(task.tile); first < task.rows;
       first += gridDim.x * static_cast<std::int64_t>(task.tile)) {
    const int here = static_cast<int>(min(static_cast<std::int64_t>(task.tile), task.rows - first));
    for (Walk at(task.columns); at.row < here;) {
      int row[n], column[n];
      std::int32_t from[n];
      uint4 vector[n];
#pragma unroll
      for (int i = 0; i < n; ++i, at.advance()) {
        row[i] = at.row;
        column[i] = at.column;
        from[i] = row[i] < here ? __ldg(task.idx + first + row[i]) : -1;
      }
#pragma unroll
      for (int i = 0; i < n; ++i)
        vector[i] =
            task.src.has(from[i]) ? load_vector(task.src.row(from[i]), column[i]) : make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int i = 0; i < n; ++i) {
        if (row[i] >= here) continue;
        char* const to = task.out + (first + row[i]) * row_bytes;
        if (D == DType::u8 || !task.src.has(from[i]))
          store_vector(to, column[i], vector[i]);
        else
          store_scaled<D>(to, column[i], vector[i], __ldg(task.weights + first + row[i]));
      }
    }
  }
}

/// Device side of expand_rows_cuda; what its fields mean is said at ExpandArgs.
struct ExpandTask {
  char* out;
  RowsAt src;  // one row a token
  const std::int32_t *row_map, *row_src;
  const float* weights;
  const float* carried;
  float* carried_out;
  const std::uint32_t* words;
  std::uint32_t* words_out;
  int words_a_row;
  std::int64_t rows;
  int top_k, columns, tile;

  /// The row of a slot, or -1.
  __device__ __forceinline__ std::int32_t row_of(std::int64_t slot) const {
    const std::int32_t row = __ldg(row_map + slot);
    return row < rows ? row : -1;
  }
};

/// What travels beside the rows of tokens [first, first + here): a number for each slot, words for each token.
__device__ __forceinline__ void carry_beside(const ExpandTask& task, std::int64_t first, int here) {
  const int top_k = task.top_k, slots = here * top_k, words = task.words_a_row;
  if (task.carried_out)
#pragma unroll 1
    for (int slot = threadIdx.x; slot < slots; slot += kRowThreads) {
      const std::int32_t to = task.row_of(first * top_k + slot);
      if (to >= 0) task.carried_out[to] = __ldg(task.carried + first * top_k + slot);
    }
  if (task.words_out)
#pragma unroll 1
    for (std::int64_t i = threadIdx.x; i < static_cast<std::int64_t>(slots) * words; i += kRowThreads) {
      const std::int64_t slot = i / words, word = i % words;
      const std::int32_t to = task.row_of(first * top_k + slot);
      if (to >= 0)
        task.words_out[static_cast<std::int64_t>(to) * words + word] =
            __ldg(task.words + (first + slot / top_k) * words + word);
    }
}

__device__ __forceinline__ void zero_row(const ExpandTask& task, std::int64_t row) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  char* const to = task.out + row * task.columns * kVectorBytes;
  for (int column = lane; column < task.columns; column += 32)
    store_vector(to, column, make_uint4(0, 0, 0, 0));
  if (task.carried_out && lane == 0) task.carried_out[row] = 0.0f;
  if (task.words_out)
#pragma unroll 1
    for (int word = lane; word < task.words_a_row; word += 32)
      task.words_out[row * task.words_a_row + word] = 0;
}

template <DType D>
__global__ void __launch_bounds__(kRowThreads, kExpandCtas) expand_kernel(const ExpandTask task) {
  constexpr int n = kVectorsAtOnce;
  const std::int64_t row_bytes = static_cast<std::int64_t>(task.columns) * kVectorBytes;
  const int top_k = task.top_k;
  for (std::int64_t first = blockIdx.x * static_cast<std::int64_t>(task.tile); first < task.src.count;
       first += gridDim.x * static_cast<std::int64_t>(task.tile)) {
    const int here = static_cast<int>(min(static_cast<std::int64_t>(task.tile), task.src.count - first));
    const std::int64_t first_slot = first * top_k;
    for (Walk at(task.columns); at.row < here;) {
      int token[n], column[n];
      uint4 vector[n];
#pragma unroll
      for (int i = 0; i < n; ++i, at.advance()) {
        token[i] = at.row;
        column[i] = at.column;
        if (at.row < here) vector[i] = load_vector(task.src.row(first + at.row), at.column);
      }
      for (int k = 0; k < top_k; ++k) {
        std::int32_t to[n];
#pragma unroll
        for (int i = 0; i < n; ++i)
          to[i] = token[i] < here ? task.row_of(first_slot + token[i] * top_k + k) : -1;
#pragma unroll
        for (int i = 0; i < n; ++i)
          if (to[i] >= 0)
            store_scaled<D>(task.out + to[i] * row_bytes, column[i], vector[i],
                            D == DType::u8 ? 0.0f : __ldg(task.weights + first_slot + token[i] * top_k + k));
      }
    }
    carry_beside(task, first, here);
  }
  each_padding_row(task.row_src, task.rows, [&](std::int64_t row) { zero_row(task, row); });
}

}  // namespace flexep
