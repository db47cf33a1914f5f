// How the kernels of rows are cut into CTAs. Grids come from the number of SMs, tiles from the width of a row.
#pragma once
#include <algorithm>
#include <cstdint>

#include "base/cuda_check.h"
#include "base/math.h"
#include "ops/rows.h"
#include "ops/rows_vector.cuh"

namespace flexep {

constexpr int kTileVectors = 2048;  // of one CTA at once, unless a row alone is longer
constexpr int kTileSlots = 2048;    // of one CTA at once, unless a token alone has more

inline std::int64_t multiprocessors() {
  int device = 0, count = 0;
  cuda_check(cudaGetDevice(&device), "current CUDA device");
  cuda_check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "number of SMs");
  return count;
}

/// Vectors of a row.
inline int columns_of(std::int64_t hidden, DType dtype) {
  return static_cast<int>(hidden * size_of(dtype) / kVectorBytes);
}

/// `tile` rows go to a CTA at once, tile after tile to `ctas` CTAs.
struct Tiles {
  int tile, ctas;

  /// `columns` vectors a row; `ctas_of_sm` of them share an SM; a tile has at most `most` rows.
  Tiles(std::int64_t rows, std::int64_t columns, int ctas_of_sm, std::int64_t most = kTileVectors) {
    const std::int64_t room = multiprocessors() * ctas_of_sm;
    const std::int64_t each = std::max<std::int64_t>(1, ceil_div(rows, room));
    tile = static_cast<int>(
        std::max<std::int64_t>(1, std::min({kTileVectors / std::max<std::int64_t>(1, columns), each, most})));
    ctas = static_cast<int>(std::min(room, std::max<std::int64_t>(1, ceil_div<std::int64_t>(rows, tile))));
  }
};

inline RowsAt rows_at(const RowsIn& rows, std::int64_t count) {
  return {static_cast<const char*>(rows.data), rows.stride, count};
}

inline cudaStream_t stream_of(std::uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

}  // namespace flexep
