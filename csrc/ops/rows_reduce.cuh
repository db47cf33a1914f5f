// Kernels of reduce_rows and dot_rows: fp32 sums in the order that rows.h promises, products rounded first.
#pragma once
#include "ops/rows_vector.cuh"

namespace flexep {

constexpr int kReduceSlots = 2048;            // of a tile at most
constexpr int kReduceCtas = 4;                // of one SM
constexpr int kDotVectors = 2;                // of either row that a lane loads before it adds the first
constexpr std::int32_t kNoTerm = 0x7fffffff;  // sorts behind every row

/// Rows of one sum that a lane loads before it adds the first; sums of groups need registers of their own.
template <bool kGroups>
constexpr int kTermsAtOnce = kGroups ? 4 : 8;

/// Device side of reduce_rows_cuda. `columns`: vectors of a row of src. `tile`: tokens that a CTA takes at once.
struct ReduceTask {
  char* out;
  RowsAt src;
  const std::int32_t* idx;
  const float* weights;
  const std::int32_t* groups;
  DType group_dtype;
  bool sort;
  std::int64_t tokens;
  int top_k, columns, tile;
};

/// One term of a sum: `row` of src, with kEnds where its group ends, times `weight`.
struct Term {
  static constexpr std::uint32_t kEnds = 0x80000000u;
  std::uint32_t row;
  float weight;
};

/// The terms of every token of a tile in the order of their sums, in shared memory.
struct TermLists {
  Term* terms;           // [tile, top_k]
  std::int32_t* keys;    // [tile, top_k]: what is sorted by; then the group of each term
  std::int32_t* counts;  // [tile]

  static std::size_t bytes(std::int64_t tile, std::int64_t top_k) {
    return tile * top_k * (sizeof(Term) + sizeof(std::int32_t)) + tile * sizeof(std::int32_t);
  }
  __device__ TermLists(char* shared, int tile, int top_k)
      : terms(reinterpret_cast<Term*>(shared)),
        keys(reinterpret_cast<std::int32_t*>(terms + tile * top_k)),
        counts(keys + tile * top_k) {}

  /// All lanes of the CTA call; they meet before it returns. Nobody may still read the lists of the tile before.
  template <bool kGroups>
  __device__ void fill(const ReduceTask& task, std::int64_t first, int here) {
    const int top_k = task.top_k, slots = here * top_k;
    const std::int64_t base = first * top_k;
    for (int slot = threadIdx.x; slot < slots; slot += kRowThreads) {
      const std::int32_t row = __ldg(task.idx + base + slot);
      keys[slot] = !task.src.has(row) ? kNoTerm : task.sort ? row : slot;
    }
    __syncthreads();
    for (int slot = threadIdx.x; slot < slots; slot += kRowThreads) {
      const int token = slot / top_k;
      const int at = place(keys + token * top_k, top_k, slot - token * top_k);
      if (slot == token * top_k) counts[token] = count(keys + token * top_k, top_k);
      if (at < 0) continue;
      const std::int32_t row = task.sort ? keys[slot] : __ldg(task.idx + base + slot);
      terms[token * top_k + at] = {static_cast<std::uint32_t>(row),
                                   task.weights ? __ldg(task.weights + base + slot) : 1.0f};
    }
    __syncthreads();
    if constexpr (kGroups) mark_ends(task, base, slots);
  }

 private:
  /// How many keys stand before keys[mine]; -1 if that is no term. Equal keys keep their order.
  __device__ static int place(const std::int32_t* keys, int top_k, int mine) {
    const std::int32_t key = keys[mine];
    int before = 0;
    for (int k = 0; k < top_k; ++k) before += keys[k] < key || (keys[k] == key && k < mine);
    return key == kNoTerm ? -1 : before;
  }
  __device__ static int count(const std::int32_t* keys, int top_k) {
    int terms = 0;
    for (int k = 0; k < top_k; ++k) terms += keys[k] != kNoTerm;
    return terms;
  }
  __device__ void mark_ends(const ReduceTask& task, std::int64_t base, int slots) {
    // A slot's place is looked up again, before the keys make room for the groups.
    const int top_k = task.top_k, steps = (slots + kRowThreads - 1) / kRowThreads;
    constexpr int kSteps = kReduceSlots / kRowThreads;
    int at[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int slot = i * kRowThreads + static_cast<int>(threadIdx.x), token = slot / top_k;
      at[i] = i < steps && slot < slots ? place(keys + token * top_k, top_k, slot - token * top_k) : -1;
      if (at[i] >= 0) at[i] += token * top_k;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
      if (at[i] >= 0) keys[at[i]] = __ldg(task.groups + base + i * kRowThreads + threadIdx.x);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (at[i] < 0) continue;
      const int token = at[i] / top_k;
      const bool last = at[i] + 1 == token * top_k + counts[token];
      if (last || keys[at[i]] != keys[at[i] + 1]) terms[at[i]].row |= Term::kEnds;
    }
    __syncthreads();
  }
};

/// One vector of the sum of `count` terms. A sum starts from -0, to which adding a first term changes nothing.
template <DType In, DType Out, bool kGroups>
__device__ __forceinline__ void reduce_vector(char* out, const ReduceTask& task, const Term* terms, int count,
                                              int column) {
  constexpr int kWidth = kVector<In>, n = kTermsAtOnce<kGroups>;
  float sum[kWidth], total[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sum[i] = total[i] = count == 0 ? 0.0f : -0.0f;
  for (int begin = 0; begin < count; begin += n) {
    uint4 vector[n];
#pragma unroll
    for (int j = 0; j < n; ++j)
      if (begin + j < count)
        vector[j] = load_vector(task.src.row(terms[begin + j].row & ~Term::kEnds), column);
#pragma unroll
    for (int j = 0; j < n; ++j) {
      if (begin + j >= count) continue;
      const Term term = terms[begin + j];
      float x[kWidth];
      widen<In>(x, vector[j]);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum[i] = sum[i] + term.weight * x[i];
      if (kGroups && (term.row & Term::kEnds)) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          total[i] = total[i] + rounded(task.group_dtype, sum[i]);
          sum[i] = -0.0f;
        }
      }
    }
  }
  store_packed(out, column, round_to<Out>(kGroups ? total : sum));
}

template <DType In, DType Out, bool kGroups>
__global__ void __launch_bounds__(kRowThreads, kReduceCtas) reduce_kernel(const ReduceTask task) {
  extern __shared__ __align__(16) char shared[];
  TermLists lists(shared, task.tile, task.top_k);
  const std::int64_t out_bytes =
      static_cast<std::int64_t>(task.columns) * kVector<In> * (Out == DType::f32 ? 4 : 2);
  for (std::int64_t first = blockIdx.x * static_cast<std::int64_t>(task.tile); first < task.tokens;
       first += gridDim.x * static_cast<std::int64_t>(task.tile)) {
    const int here = static_cast<int>(min(static_cast<std::int64_t>(task.tile), task.tokens - first));
    lists.fill<kGroups>(task, first, here);
    for (Walk at(task.columns); at.row < here; at.advance())
      reduce_vector<In, Out, kGroups>(task.out + (first + at.row) * out_bytes, task,
                                      lists.terms + at.row * task.top_k, lists.counts[at.row], at.column);
    __syncthreads();  // the lists have been read
  }
}

/// Device side of dot_rows_cuda: out[m] = a[m / repeat] . b[idx[m]]. `columns`: vectors of a row.
struct DotTask {
  float* out;
  RowsAt a, b;
  const std::int32_t* idx;
  std::int64_t count;
  int repeat, columns;
};

/// A vector covers kVector of the 32 lanes of the promised order, so 32 / kVector neighbours own a dot: each holds the
/// lanes of its vector, adds down the rows, and the tree goes over neighbours first and over the lanes of one last.
template <DType D>
__global__ void __launch_bounds__(kRowThreads, 4) dot_kernel(const DotTask task) {
  constexpr int kWidth = kVector<D>, kOwners = 32 / kWidth, n = kDotVectors;
  const int owner = static_cast<int>(threadIdx.x) % kOwners;
  constexpr int kDots = kRowThreads / kOwners;  // of a CTA
  for (std::int64_t base = blockIdx.x * static_cast<std::int64_t>(kDots); base < task.count;
       base += gridDim.x * static_cast<std::int64_t>(kDots)) {
    const std::int64_t dot = base + threadIdx.x / kOwners;
    const std::int32_t other = dot < task.count ? __ldg(task.idx + dot) : -1;
    float sum[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum[i] = 0.0f;
    if (task.b.has(other)) {
      const char* const a = task.a.row(dot / task.repeat);
      const char* const b = task.b.row(other);
      for (int begin = owner; begin < task.columns; begin += n * kOwners) {
        uint4 left[n], right[n];
#pragma unroll
        for (int j = 0; j < n; ++j)
          if (begin + j * kOwners < task.columns) {
            left[j] = load_vector(a, begin + j * kOwners);
            right[j] = load_vector(b, begin + j * kOwners);
          }
#pragma unroll
        for (int j = 0; j < n; ++j) {
          if (begin + j * kOwners >= task.columns) continue;
          float x[kWidth], y[kWidth];
          widen<D>(x, left[j]);
          widen<D>(y, right[j]);
#pragma unroll
          for (int i = 0; i < kWidth; ++i) sum[i] = sum[i] + x[i] * y[i];
        }
      }
    }
#pragma unroll
    for (int half = kOwners / 2; half > 0; half /= 2)
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum[i] = sum[i] + __shfl_down_sync(0xffffffffu, sum[i], half);
#pragma unroll
    for (int half = kWidth / 2; half > 0; half /= 2)
#pragma unroll
      for (int i = 0; i < half; ++i) sum[i] = sum[i] + sum[i + half];
    if (owner == 0 && dot < task.count) task.out[dot] = canonical(sum[0]);
  }
}

}  // namespace flexep
