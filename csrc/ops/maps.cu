#include <algorithm>

#include "base/cuda_check.h"
#include "base/math.h"
#include "ops/maps_cuda.h"

namespace flexep {
namespace {

constexpr int kThreads = 256;
constexpr int kWarpLanes = 32;
constexpr int kAhead = 8;  // loads in flight

/// kEach consecutive experts of a token, written at once.
template <int kEach>
struct Cell {
  float probs[kEach];
  std::uint8_t mask[kEach];
};

template <int kEach>
__device__ void write(float* to, const float (&from)[kEach]) {
  if constexpr (kEach == 4)
    *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
  else
    *to = from[0];
}

template <int kEach>
__device__ void write(std::uint8_t* to, const std::uint8_t (&from)[kEach]) {
  if constexpr (kEach == 4)
    *reinterpret_cast<uchar4*>(to) = make_uchar4(from[0], from[1], from[2], from[3]);
  else
    *to = from[0];
}

/// A thread fills a cell: it looks at all slots of the token, whose ids its neighbours read too.
template <int kEach>
__global__ void __launch_bounds__(kThreads)
    multihot_kernel(std::uint8_t* mask, float* probs, Integers idx, const float* weights, MapShape shape) {
  const std::int64_t cells = shape.tokens * (shape.experts / kEach);
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= cells) return;
  const std::int64_t t = at / (shape.experts / kEach), first = at * kEach - t * shape.experts;
  Cell<kEach> cell{};
  for (std::int64_t k = 0; k < shape.top_k; ++k) {
    const std::int64_t slot = t * shape.top_k + k, e = idx[slot] - first;
    if (e < 0 || e >= kEach) continue;
    const float weight = probs ? weights[slot] : 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (i != e) continue;
      cell.probs[i] = cell.mask[i] ? cell.probs[i] + weight : weight;  // a sum starts from its first term
      cell.mask[i] = 1;
    }
  }
  if (mask) write<kEach>(mask + at * kEach, cell.mask);
  if (probs) write<kEach>(probs + at * kEach, cell.probs);
}

/// A warp takes a token, a lane an expert: the votes of lower lanes say how many come before.
__global__ void __launch_bounds__(kThreads)
    indices_kernel(std::int32_t* idx, const std::uint8_t* mask, MapShape shape) {
  const std::int64_t t = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarpLanes;
  if (t >= shape.tokens) return;
  const int lane = threadIdx.x % kWarpLanes;
  std::int32_t* const row = idx + t * shape.top_k;
  std::int64_t found = 0;
  for (std::int64_t first = lane; first - lane < shape.experts; first += kAhead * kWarpLanes) {
    bool set[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const std::int64_t e = first + j * kWarpLanes;
      set[j] = e < shape.experts && mask[t * shape.experts + e];
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const unsigned votes = __ballot_sync(0xffffffffu, set[j]);
      const std::int64_t k = found + __popc(votes & ((1u << lane) - 1));
      if (set[j] && k < shape.top_k) row[k] = static_cast<std::int32_t>(first + j * kWarpLanes);
      found += __popc(votes);
    }
  }
  for (std::int64_t k = found + lane; k < shape.top_k; k += kWarpLanes) row[k] = -1;
}

__global__ void __launch_bounds__(kThreads)
    take_columns_kernel(float* out, const float* values, Integers idx, MapShape shape) {
  const std::int64_t slot = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (slot >= shape.tokens * shape.top_k) return;
  const std::int64_t e = idx[slot];
  out[slot] = e >= 0 && e < shape.experts ? values[slot / shape.top_k * shape.experts + e] : 0.0f;
}

/// A band of the padded map's rows; blockIdx.x says which, blockIdx.y the columns.
struct Band {
  std::int64_t begin, end, column;
  __device__ Band(std::int64_t rows, std::int64_t bands)
      : begin(rows * blockIdx.x / bands),
        end(rows * (blockIdx.x + 1) / bands),
        column(static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x) {}
};

/// Whether rows first .. first + kAhead - 1 of a column are set; those past the map, or `end`, are not.
struct Ahead {
  bool set[kAhead];
  __device__ Ahead(const std::uint8_t* mask, const MapShape& shape, std::int64_t first, std::int64_t end,
                   std::int64_t column) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j)
      set[j] = first + j < end && first + j < shape.tokens && mask[(first + j) * shape.experts + column];
  }
};

__global__ void __launch_bounds__(kThreads)
    count_columns_kernel(std::int32_t* counts, const std::uint8_t* mask, MapShape shape, std::int64_t rows) {
  const Band band(rows, gridDim.x);
  if (band.column >= shape.experts) return;
  std::int32_t count = 0;
  for (std::int64_t first = band.begin; first < band.end; first += kAhead) {
    const Ahead ahead(mask, shape, first, band.end, band.column);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) count += ahead.set[j];
  }
  counts[blockIdx.x * shape.experts + band.column] = count;
}

/// Each column gains its first unset rows, as many as its sum misses to the multiple.
__global__ void __launch_bounds__(kThreads)
    pad_columns_kernel(std::uint8_t* out, const std::uint8_t* mask, const std::int32_t* counts,
                       MapShape shape, std::int64_t rows, std::int32_t multiple) {
  const Band band(rows, gridDim.x);
  if (band.column >= shape.experts) return;
  std::int32_t below = 0, total = 0;
  for (int first = 0; first < gridDim.x; first += kAhead) {
    std::int32_t count[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j)
      count[j] = first + j < gridDim.x ? counts[(first + j) * shape.experts + band.column] : 0;
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      total += count[j];
      below += first + j < blockIdx.x ? count[j] : 0;
    }
  }
  const std::int32_t missing = (multiple - total % multiple) % multiple;
  std::int64_t unset = band.begin - below;
  for (std::int64_t first = band.begin; first < band.end; first += kAhead) {
    const Ahead ahead(mask, shape, first, band.end, band.column);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (first + j >= band.end) break;
      out[(first + j) * shape.experts + band.column] = ahead.set[j] || unset < missing;
      unset += !ahead.set[j];
    }
  }
}

unsigned blocks_of(std::int64_t threads) {
  return static_cast<unsigned>(ceil_div<std::int64_t>(threads, kThreads));
}

cudaStream_t stream_of(std::uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

bool is_aligned(const void* to, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(to) % bytes == 0;
}

}  // namespace

void indices_to_multihot_cuda(std::uint8_t* mask, float* probs, const Integers& idx, const float* weights,
                              MapShape shape, std::uintptr_t stream) {
  const std::int64_t cells = shape.tokens * shape.experts;
  if (cells == 0) return;
  constexpr int kEach = 4;
  const bool whole =
      shape.experts % kEach == 0 && is_aligned(mask, kEach) && is_aligned(probs, kEach * sizeof(float));
  const auto kernel = whole ? multihot_kernel<kEach> : multihot_kernel<1>;
  kernel<<<blocks_of(whole ? cells / kEach : cells), kThreads, 0, stream_of(stream)>>>(mask, probs, idx,
                                                                                       weights, shape);
  cuda_check(cudaGetLastError(), "indices_to_multihot launch");
}

void multihot_to_indices_cuda(std::int32_t* idx, const std::uint8_t* mask, MapShape shape,
                              std::uintptr_t stream) {
  if (shape.tokens == 0) return;
  indices_kernel<<<blocks_of(shape.tokens * kWarpLanes), kThreads, 0, stream_of(stream)>>>(idx, mask, shape);
  cuda_check(cudaGetLastError(), "multihot_to_indices launch");
}

void take_columns_cuda(float* out, const float* values, const Integers& idx, MapShape shape,
                       std::uintptr_t stream) {
  const std::int64_t slots = shape.tokens * shape.top_k;
  if (slots == 0) return;
  take_columns_kernel<<<blocks_of(slots), kThreads, 0, stream_of(stream)>>>(out, values, idx, shape);
  cuda_check(cudaGetLastError(), "take_columns launch");
}

void pad_routing_map_cuda(std::uint8_t* out, const std::uint8_t* mask, std::int32_t* counts, MapShape shape,
                          std::int64_t multiple, std::uintptr_t stream) {
  const std::int64_t rows = align_up(shape.tokens, multiple);
  if (rows == 0 || shape.experts == 0) return;
  constexpr std::int64_t kFewestRows = 32;  // of a band
  const dim3 grid(static_cast<unsigned>(std::min(kMapBands, ceil_div(rows, kFewestRows))),
                  blocks_of(shape.experts));
  count_columns_kernel<<<grid, kThreads, 0, stream_of(stream)>>>(counts, mask, shape, rows);
  cuda_check(cudaGetLastError(), "pad_routing_map launch");
  pad_columns_kernel<<<grid, kThreads, 0, stream_of(stream)>>>(out, mask, counts, shape, rows,
                                                               static_cast<std::int32_t>(multiple));
  cuda_check(cudaGetLastError(), "pad_routing_map launch");
}

}  // namespace flexep
