// Sixteen bytes at a time: how a lane loads, widens, rounds and stores the elements of a row, and how the lanes of a
// CTA walk through a tile of rows. Rounding gives the bits of base/dtype.h.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "base/dtype.h"

namespace flexep {

constexpr int kRowThreads = 256;
constexpr int kVectorBytes = 16;

/// Elements of a vector.
template <DType D>
constexpr int kVector = D == DType::f32 ? 4 : 8;

/// Rows that lie `stride` bytes apart; `count` of them may be read.
struct RowsAt {
  const char* data;
  std::int64_t stride, count;

  __device__ __forceinline__ bool has(std::int32_t row) const { return row >= 0 && row < count; }
  __device__ __forceinline__ const char* row(std::int64_t row) const { return data + row * stride; }
};

__device__ __forceinline__ uint4 load_vector(const char* row, int column) {
  return __ldg(reinterpret_cast<const uint4*>(row) + column);
}

/// Outputs are longer than the caches: what is written is evicted first.
__device__ __forceinline__ void store_vector(char* row, int column, const uint4& vector) {
  __stcs(reinterpret_cast<uint4*>(row) + column, vector);
}

template <class T>
__device__ __forceinline__ T bits_as(std::uint32_t bits) {
  T value;
  static_assert(sizeof value == sizeof bits);
  memcpy(&value, &bits, sizeof value);
  return value;
}

template <class T>
__device__ __forceinline__ std::uint32_t bits_from(const T& value) {
  std::uint32_t bits;
  static_assert(sizeof value == sizeof bits);
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

template <DType D>
__device__ __forceinline__ void widen(float (&x)[kVector<D>], const uint4& vector) {
  const std::uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (D == DType::f32) {
      x[i] = float_of(words[i]);
    } else if constexpr (D == DType::bf16) {
      x[2 * i] = float_of(words[i] << 16);
      x[2 * i + 1] = float_of(words[i] & 0xffff0000u);
    } else {
      const float2 two = __half22float2(bits_as<__half2>(words[i]));
      x[2 * i] = two.x;
      x[2 * i + 1] = two.y;
    }
  }
}

/// N elements of D.
template <DType D, int N>
struct Packed {
  static constexpr int kWords = N * (D == DType::f32 ? 4 : 2) / 4;
  std::uint32_t words[kWords];
};

/// Two numbers of 16 bits, as a conversion of the hardware gives them, with the NaN of base/dtype.h. The hardware's is
/// always 0x7fff, which as a signed integer is above every number, so that the lesser of the two is right everywhere: one
/// instruction, where a test of every number took as long as the sum that it ended.
__device__ __forceinline__ std::uint32_t with_promised_nan(std::uint32_t two, std::uint16_t nan) {
  return __vmins2(two, nan * 0x10001u);
}

/// The conversions of the hardware round as base/dtype.h does, but for NaN.
template <DType D, int N>
__device__ __forceinline__ Packed<D, N> round_to(const float (&x)[N]) {
  Packed<D, N> out;
#pragma unroll
  for (int i = 0; i < Packed<D, N>::kWords; ++i) {
    if constexpr (D == DType::f32)
      out.words[i] = bits_of(canonical(x[i]));
    else if constexpr (D == DType::bf16)
      out.words[i] = with_promised_nan(bits_from(__floats2bfloat162_rn(x[2 * i], x[2 * i + 1])), kNanBF16);
    else
      out.words[i] = with_promised_nan(bits_from(__floats2half2_rn(x[2 * i], x[2 * i + 1])), kNanF16);
  }
  return out;
}

/// The same for one number that is added to others: whatever NaN it is, what is stored in the end is the promised one.
__device__ __forceinline__ float rounded(DType dtype, float x) {
  return dtype == DType::bf16  ? __bfloat162float(__float2bfloat16_rn(x))
         : dtype == DType::f16 ? __half2float(__float2half_rn(x))
                               : x;
}

/// Calls store(where, vector) for the elements at `to`: 8 bytes, or 16 at a time.
template <DType D, int N, class Store>
__device__ __forceinline__ void each_vector(char* to, const Packed<D, N>& value, const Store& store) {
  const auto& w = value.words;
  if constexpr (Packed<D, N>::kWords == 2)
    store(to, make_uint2(w[0], w[1]));
  else
#pragma unroll
    for (int i = 0; i < Packed<D, N>::kWords; i += 4)
      store(to + 4 * i, make_uint4(w[i], w[i + 1], w[i + 2], w[i + 3]));
}

/// Vector number `column` of a row of Packed ones: 8, 16 or 32 bytes.
template <DType D, int N>
__device__ __forceinline__ void store_packed(char* row, int column, const Packed<D, N>& value) {
  each_vector(row + static_cast<std::int64_t>(column) * sizeof value, value,
              [](char* to, auto vector) { __stcs(reinterpret_cast<decltype(vector)*>(to), vector); });
}

/// The vectors of a tile of rows that one lane of a CTA owns: all rows laid end to end, lane i takes vector i, then
/// every kRowThreads-th. So no width of a row leaves lanes idle.
struct Walk {
  int row, column;

  __device__ __forceinline__ explicit Walk(int columns)
      : row(static_cast<int>(threadIdx.x) / columns),
        column(static_cast<int>(threadIdx.x) % columns),
        columns_(columns),
        rows_a_step_(kRowThreads / columns),
        columns_a_step_(kRowThreads % columns) {}

  __device__ __forceinline__ void advance() {
    row += rows_a_step_;
    column += columns_a_step_;
    if (column >= columns_) {
      column -= columns_;
      ++row;
    }
  }

 private:
  int columns_, rows_a_step_, columns_a_step_;
};

/// Calls `zero(row)` with all lanes of a warp, for each row whose row_src is negative; the rows are dealt to all warps
/// of the grid like cards, because those of padding lie side by side.
template <class Zero>
__device__ __forceinline__ void each_padding_row(const std::int32_t* row_src, std::int64_t rows,
                                                 const Zero& zero) {
  constexpr int kWarps = kRowThreads / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * kWarps;
  const std::int64_t mine = blockIdx.x + static_cast<std::int64_t>(gridDim.x) * (threadIdx.x / 32);
  for (std::int64_t dealt = 0; dealt < rows; dealt += 32 * warps) {
    const std::int64_t row = dealt + lane * warps + mine;
    unsigned padding = __ballot_sync(0xffffffffu, row < rows && __ldg(row_src + row) < 0);
    for (; padding != 0; padding &= padding - 1) zero(dealt + (__ffs(padding) - 1) * warps + mine);
  }
}

}  // namespace flexep
