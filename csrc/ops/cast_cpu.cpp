#include <algorithm>
#include <cstring>
#include <vector>

#include "base/parallel.h"
#include "ops/cast.h"

namespace flexep {
namespace {

float element(const void* row, DType dtype, std::int64_t h) {
  if (dtype == DType::f32) return static_cast<const float*>(row)[h];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(row)[h];
  return dtype == DType::bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}

void store_element(void* row, DType dtype, std::int64_t h, float x) {
  if (dtype == DType::f32)
    static_cast<float*>(row)[h] = canonical(x);
  else
    static_cast<std::uint16_t*>(row)[h] = dtype == DType::bf16 ? f32_to_bf16(x) : f32_to_f16(x);
}

/// One row cast: its payload and the scale of each block.
struct CastRow {
  std::vector<std::uint8_t> payload;
  std::vector<float> scales, wide;

  explicit CastRow(std::int64_t hidden)
      : payload(hidden), scales(ceil_div<std::int64_t>(hidden, kScaleBlock)), wide(hidden) {}

  void fill(const void* row, DType dtype) {
    const auto hidden = static_cast<std::int64_t>(payload.size());
    for (std::int64_t h = 0; h < hidden; ++h) wide[h] = element(row, dtype, h);
    for (std::size_t block = 0; block < scales.size(); ++block) {
      const std::int64_t begin = static_cast<std::int64_t>(block) * kScaleBlock;
      const std::int64_t end = std::min(hidden, begin + kScaleBlock);
      std::uint32_t amax = 0;  // magnitudes of floats order as their bits do
      for (std::int64_t h = begin; h < end; ++h) {
        const std::uint32_t magnitude = bits_of(wide[h]) & 0x7fffffffu;
        amax = std::max(amax, magnitude > 0x7f800000u ? 0u : magnitude);
      }
      const float scale = scales[block] = scale_of(float_of(amax));
      for (std::int64_t h = begin; h < end; ++h) payload[h] = f32_to_e4m3(wide[h] / scale);
    }
  }
};

}  // namespace

void quantize_rows(const QuantizeArgs& args, int threads) {
  const std::int64_t blocks = ceil_div<std::int64_t>(args.hidden, kScaleBlock);
  const std::int64_t src_bytes = args.hidden * size_of(args.src.dtype);
  const auto write = [&](std::int64_t row, const CastRow& cast) {
    std::memcpy(args.payload + row * args.hidden, cast.payload.data(), cast.payload.size());
    std::memcpy(args.scales + row * blocks, cast.scales.data(), blocks * sizeof(float));
  };
  parallel_for(args.tokens, args.tokens * src_bytes + args.rows * args.hidden, threads,
               [&](std::int64_t begin, std::int64_t end) {
                 CastRow cast(args.hidden);
                 for (std::int64_t t = begin; t < end; ++t) {
                   cast.fill(static_cast<const char*>(args.src.data) + t * args.src.stride, args.src.dtype);
                   if (!args.row_map) write(t, cast);
                   for (std::int64_t k = 0; args.row_map && k < args.top_k; ++k)
                     if (const std::int32_t row = args.row_map[t * args.top_k + k]; row >= 0)
                       write(row, cast);
                 }
               });
  for (std::int64_t row = 0; args.row_src && row < args.rows; ++row) {
    if (args.row_src[row] >= 0) continue;
    std::memset(args.payload + row * args.hidden, 0, args.hidden);
    std::memset(args.scales + row * blocks, 0, blocks * sizeof(float));
  }
}

void dequantize_rows(const DequantizeArgs& args, int threads) {
  const std::int64_t blocks = ceil_div<std::int64_t>(args.hidden, kScaleBlock);
  const std::int64_t out_bytes = args.hidden * size_of(args.out_dtype);
  parallel_for(args.rows, args.rows * (args.hidden + out_bytes), threads,
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t row = begin; row < end; ++row) {
                   const auto* const payload =
                       static_cast<const std::uint8_t*>(args.payload.data) + row * args.payload.stride;
                   char* const out = static_cast<char*>(args.out) + row * out_bytes;
                   for (std::int64_t h = 0; h < args.hidden; ++h)
                     store_element(out, args.out_dtype, h,
                                   e4m3_to_f32(payload[h]) * args.scales[row * blocks + h / kScaleBlock]);
                 }
               });
}

}  // namespace flexep
