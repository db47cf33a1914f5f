// What a warp of a team that plays a whole role (device_exec.cu) does with a row: by ordinary loads and stores, four
// elements a lane. The same bits as host_rows.h. Crews have faster ones: device_rows.cuh.
#pragma once
#include <climits>
#include <cstdint>

#include "kernels/args.h"
#include "kernels/chunks.h"
#include "kernels/collect.h"
#include "kernels/device_rows.cuh"

namespace flexep {

/// Four neighbouring elements as floats. Rows are multiples of 16 bytes, so four always divide them.
struct Four {
  float at[4];
};

__device__ __forceinline__ float load_one(DType dtype, const void* row, std::int64_t h) {
  if (dtype == DType::f32) return static_cast<const float*>(row)[h];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(row)[h];
  return dtype == DType::bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}

__device__ __forceinline__ Four load_four(DType dtype, const void* row, std::int64_t h) {
  if (dtype == DType::f32) {
    const float4 four = *reinterpret_cast<const float4*>(static_cast<const float*>(row) + h);
    return {{four.x, four.y, four.z, four.w}};
  }
  const uint2 four = *reinterpret_cast<const uint2*>(static_cast<const std::uint16_t*>(row) + h);
  Four out;
  for (int i = 0; i < 4; ++i) {
    const auto bits = static_cast<std::uint16_t>((i < 2 ? four.x : four.y) >> (16 * (i % 2)));
    out.at[i] = dtype == DType::bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
  }
  return out;
}

__device__ __forceinline__ void store_four(DType dtype, void* row, std::int64_t h, const Four& four) {
  if (dtype == DType::f32) {
    *reinterpret_cast<float4*>(static_cast<float*>(row) + h) = {canonical(four.at[0]), canonical(four.at[1]),
                                                                canonical(four.at[2]), canonical(four.at[3])};
    return;
  }
  std::uint32_t bits[4];
  for (int i = 0; i < 4; ++i)
    bits[i] = dtype == DType::bf16 ? f32_to_bf16(four.at[i]) : f32_to_f16(four.at[i]);
  *reinterpret_cast<uint2*>(static_cast<std::uint16_t*>(row) + h) = {bits[0] | bits[1] << 16,
                                                                     bits[2] | bits[3] << 16};
}

/// Expands, weights, dots or copies each row that arrives, and clears the rows that nothing fills.
class TeamPlace {
 public:
  __device__ TeamPlace(const DeliverArgs& args, int ranks)
      : args_(args), received_(args.arrivals.base[ranks]), row_bytes_(args.hidden * size_of(args.dtype)) {}

  /// Clears the rows of a share that nothing fills.
  __device__ void pad(Range mine) const {
    for (int row = mine.begin; row < mine.end; ++row) {
      if (args_.flat ? row < received_ : args_.row_src[row] >= 0) continue;
      for (std::int64_t i = lane(); i < row_bytes_ / 16; i += 32)
        reinterpret_cast<uint4*>(out(row))[i] = {0, 0, 0, 0};
      if (args_.dot_with && lane() == 0) args_.dots[row] = 0.0f;
    }
  }

  __device__ void place(int j, const void* row, const void*) {
    if (args_.flat) return WarpMem::copy(out(j), row, row_bytes_);
    const int top_k = args_.arrivals.top_k;
    for (int k = 0; k < top_k; ++k) {
      const std::int32_t to = args_.arrivals.rows[static_cast<std::int64_t>(j) * top_k + k];
      if (to < 0) continue;
      if (args_.weights)
        scale(out(to), row, args_.weights[to]);
      else
        WarpMem::copy(out(to), row, row_bytes_);
      if (args_.dot_with) dot(to, row);
    }
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ char* out(std::int64_t row) const { return static_cast<char*>(args_.out) + row * row_bytes_; }
  __device__ void scale(void* to, const void* row, float weight) const {
    for (std::int64_t h = 4 * lane(); h < args_.hidden; h += 128) {
      Four four = load_four(args_.dtype, row, h);
      for (float& x : four.at) x = weight * x;
      store_four(args_.dtype, to, h, four);
    }
  }
  /// The order of ops/rows.h: element h adds to lane h % 32, then lanes fold by halves.
  __device__ void dot(std::int32_t to, const void* row) const {
    const char* const other = static_cast<const char*>(args_.dot_with) + to * row_bytes_;
    float sum = 0.0f;
    for (std::int64_t h = lane(); h < args_.hidden; h += 32)
      sum = sum + load_one(args_.dtype, other, h) * load_one(args_.dtype, row, h);
    for (int half = 16; half > 0; half /= 2) sum = sum + __shfl_down_sync(0xffffffffu, sum, half);
    if (lane() == 0) args_.dots[to] = canonical(sum);
  }

  const DeliverArgs& args_;
  int received_;
  std::int64_t row_bytes_;
};

/// Adds rows: expert rows to a partial sum, partial sums to a domain's, either to a token's result.
class TeamAdd {
 public:
  __device__ explicit TeamAdd(const CollectArgs& args) : args_(args) {}

  __device__ void partial(int j, int, void* to) const {
    const std::int64_t y_bytes = args_.hidden * size_of(args_.dtype);
    const char* const y = static_cast<const char*>(args_.y);
    if (args_.flat) {
      if (args_.dtype == args_.wire) return WarpMem::copy(to, y + j * y_bytes, y_bytes);
      for (std::int64_t h = 4 * lane(); h < args_.hidden; h += 128)
        store_four(args_.wire, to, h, load_four(args_.dtype, y + j * y_bytes, h));
      return;
    }
    // Thread k holds slot k. Slots take their turn by ascending row, which is (expert, slot) order.
    const int top_k = args_.arrivals.top_k;
    const std::int64_t slot = static_cast<std::int64_t>(j) * top_k + lane();
    const std::int32_t row = lane() < top_k ? args_.arrivals.rows[slot] : -1;
    const float weight = row >= 0 && args_.part_weights ? args_.part_weights[slot] : 1.0f;
    int turn = -1, count = 0;
    for (int k = 0; k < top_k; ++k) {
      const std::int32_t other = __shfl_sync(0xffffffffu, row, k);
      if (other < 0) continue;
      ++count;
      if (row >= 0 && other <= row) ++turn;
    }
    for (std::int64_t first = 0; first < args_.hidden; first += 128) {
      const std::int64_t h = first + 4 * lane();
      Four sum{};
      for (int i = 0; i < count; ++i) {
        const int from = __ffs(__ballot_sync(0xffffffffu, turn == i)) - 1;
        const std::int64_t at = __shfl_sync(0xffffffffu, row, from);
        const float w = __shfl_sync(0xffffffffu, weight, from);
        if (h >= args_.hidden) continue;
        const Four term = load_four(args_.dtype, y + at * y_bytes, h);
        for (int e = 0; e < 4; ++e) sum.at[e] = i == 0 ? w * term.at[e] : sum.at[e] + w * term.at[e];
      }
      if (h < args_.hidden) store_four(args_.wire, to, h, sum);
    }
  }

  __device__ void domain_sum(const void* const* terms, int count, void* to) const {
    for (std::int64_t h = 4 * lane(); h < args_.hidden; h += 128)
      store_four(args_.wire, to, h, sum(terms, 0, count, h));
  }

  __device__ void home(int token, const void* const* terms, const int* ranks, int count) const {
    char* const to = static_cast<char*>(args_.z) + token * args_.hidden * size_of(args_.out_dtype);
    for (std::int64_t h = 4 * lane(); h < args_.hidden; h += 128) {
      Four total{};
      for (int first = 0; first < count;) {
        int end = args_.nest > 0 ? first + 1 : count;
        while (end < count && ranks[end] / args_.nest == ranks[first] / args_.nest) ++end;
        Four part = sum(terms, first, end, h);
        for (int e = 0; e < 4; ++e) {
          if (args_.nest > 0) part.at[e] = rounded(args_.wire, part.at[e]);
          total.at[e] = first == 0 ? part.at[e] : total.at[e] + part.at[e];
        }
        first = end;
      }
      store_four(args_.out_dtype, to, h, total);
    }
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ Four sum(const void* const* terms, int first, int end, std::int64_t h) const {
    Four out = load_four(args_.wire, terms[first], h);
    for (int i = first + 1; i < end; ++i) {
      const Four term = load_four(args_.wire, terms[i], h);
      for (int e = 0; e < 4; ++e) out.at[e] = out.at[e] + term.at[e];
    }
    return out;
  }

  const CollectArgs& args_;
};

}  // namespace flexep
