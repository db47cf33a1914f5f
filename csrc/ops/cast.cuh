// Kernels of quantize_rows and dequantize_rows. A lane owns 16 columns, one vector of payload; 8 lanes own a block.
#pragma once
#include <cuda_fp8.h>

#include "ops/cast.h"
#include "ops/rows_vector.cuh"

namespace flexep {

constexpr int kCastWidth = 16;  // columns of a lane
constexpr int kBlockLanes = kScaleBlock / kCastWidth;
constexpr unsigned kAllLanes = 0xffffffffu;

/// Device side of QuantizeArgs. `columns`: payload vectors of a row; `padded`: the same, up to whole blocks.
struct QuantizeTask {
  char* payload;
  float* scales;
  RowsAt src;
  const std::int32_t *row_map, *row_src;
  std::int64_t rows;
  int top_k, columns, padded, tile;

  __device__ __forceinline__ std::int64_t row_of(std::int64_t slot) const {
    const std::int64_t row = row_map ? __ldg(row_map + slot) : slot;
    return row < rows ? row : -1;
  }
};

template <DType D>
__device__ __forceinline__ void load_wide(float (&x)[kCastWidth], const char* row, int column) {
  constexpr int kParts = kCastWidth / kVector<D>;
  uint4 vector[kParts];
#pragma unroll
  for (int i = 0; i < kParts; ++i) vector[i] = load_vector(row, column * kParts + i);
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    float part[kVector<D>];
    widen<D>(part, vector[i]);
#pragma unroll
    for (int j = 0; j < kVector<D>; ++j) x[i * kVector<D> + j] = part[j];
  }
}

/// The scale of the block that these 8 neighbours hold. Magnitudes of floats order as their bits do; NaN is left out.
__device__ __forceinline__ float block_scale(const float (&x)[kCastWidth]) {
  std::uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kCastWidth; ++i) {
    const std::uint32_t magnitude = bits_of(x[i]) & 0x7fffffffu;
    amax = max(amax, magnitude > 0x7f800000u ? 0u : magnitude);
  }
#pragma unroll
  for (int half = kBlockLanes / 2; half > 0; half /= 2)
    amax = max(amax, __shfl_xor_sync(kAllLanes, amax, half));
  return scale_of(float_of(amax));
}

__device__ __forceinline__ uint4 cast_vector(const float (&x)[kCastWidth], float scale) {
  std::uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const auto low = __nv_cvt_float2_to_fp8x2(make_float2(x[4 * i] / scale, x[4 * i + 1] / scale),
                                              __NV_SATFINITE, __NV_E4M3);
    const auto high = __nv_cvt_float2_to_fp8x2(make_float2(x[4 * i + 2] / scale, x[4 * i + 3] / scale),
                                               __NV_SATFINITE, __NV_E4M3);
    words[i] = low | static_cast<std::uint32_t>(high) << 16;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ void zero_row(const QuantizeTask& task, std::int64_t row) {
  const int lane = static_cast<int>(threadIdx.x) % 32, blocks = task.padded / kBlockLanes;
  char* const to = task.payload + row * task.columns * kVectorBytes;
  for (int column = lane; column < task.columns; column += 32)
    store_vector(to, column, make_uint4(0, 0, 0, 0));
  for (int block = lane; block < blocks; block += 32) task.scales[row * blocks + block] = 0.0f;
}

template <DType D>
__global__ void __launch_bounds__(kRowThreads) quantize_kernel(const QuantizeTask task) {
  const int blocks = task.padded / kBlockLanes;
  for (std::int64_t first = blockIdx.x * static_cast<std::int64_t>(task.tile); first < task.src.count;
       first += gridDim.x * static_cast<std::int64_t>(task.tile)) {
    const int here = static_cast<int>(min(static_cast<std::int64_t>(task.tile), task.src.count - first));
    Walk at(task.padded);
    // All lanes take every step, because a block's lanes meet in it.
    for (std::int64_t step = 0; step < static_cast<std::int64_t>(here) * task.padded; step += kRowThreads) {
      const bool mine = at.row < here && at.column < task.columns;
      const std::int64_t slot = (first + at.row) * task.top_k;
      float x[kCastWidth] = {};
      if (mine) load_wide<D>(x, task.src.row(first + at.row), at.column);
      const float scale = block_scale(x);
      const uint4 payload = cast_vector(x, scale);
      for (int k = 0; mine && k < task.top_k; ++k) {
        const std::int64_t to = task.row_of(slot + k);
        if (to < 0) continue;
        store_vector(task.payload + to * task.columns * kVectorBytes, at.column, payload);
        if (at.column % kBlockLanes == 0) task.scales[to * blocks + at.column / kBlockLanes] = scale;
      }
      at.advance();
    }
  }
  if (task.row_src) each_padding_row(task.row_src, task.rows, [&](std::int64_t row) { zero_row(task, row); });
}

/// Device side of DequantizeArgs.
struct DequantizeTask {
  char* out;
  RowsAt payload;
  const float* scales;
  int columns, blocks, tile;
};

template <DType D>
__global__ void __launch_bounds__(kRowThreads) dequantize_kernel(const DequantizeTask task) {
  const std::int64_t out_bytes =
      static_cast<std::int64_t>(task.columns) * kCastWidth * (D == DType::f32 ? 4 : 2);
  for (std::int64_t first = blockIdx.x * static_cast<std::int64_t>(task.tile); first < task.payload.count;
       first += gridDim.x * static_cast<std::int64_t>(task.tile)) {
    const int here = static_cast<int>(min(static_cast<std::int64_t>(task.tile), task.payload.count - first));
    for (Walk at(task.columns); at.row < here; at.advance()) {
      const std::int64_t row = first + at.row;
      const uint4 vector = load_vector(task.payload.row(row), at.column);
      const float scale = __ldg(task.scales + row * task.blocks + at.column / kBlockLanes);
      const std::uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
      float x[kCastWidth];
#pragma unroll
      for (int i = 0; i < 2 * 4; ++i) {
        const auto two = static_cast<__nv_fp8x2_storage_t>(words[i / 2] >> (i % 2 * 16));
        const float2 wide = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3)));
        x[2 * i] = wide.x * scale;
        x[2 * i + 1] = wide.y * scale;
      }
      store_packed(task.out + row * out_bytes, at.column, round_to<D>(x));
    }
  }
}

}  // namespace flexep
