// Quantised rows: e4m3 (the finite one, "fn"), with one fp32 scale for each block of 128 columns, the last block short.
//
// scale = amax / 448, where amax is the largest magnitude of the block that is not NaN, and 1 where that quotient is 0;
// payload = x / scale, rounded to nearest even, never past +-448, NaN as 0x7f. So an Inf makes its whole block NaN when
// it is read back, and a NaN only itself. Reading back is payload * scale, rounded once. Scales are [rows, blocks].
#pragma once
#include <cstdint>

#include "base/dtype.h"
#include "base/math.h"
#include "ops/rows.h"

namespace flexep {

constexpr int kScaleBlock = 128;
constexpr float kLargestE4m3 = 448.0f;
constexpr std::uint8_t kNanE4m3 = 0x7f;

FLEXEP_CONVERT std::uint8_t f32_to_e4m3(float x) {
  const std::uint32_t u = bits_of(x), magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return kNanE4m3;
  const auto sign = static_cast<std::uint8_t>(u >> 24 & 0x80u);
  if (magnitude >= 0x43e00000u) return sign | 0x7eu;  // 448 and up
  // Below 2^-6 the result is subnormal: adding 2^14 lets the float adder round to its unit, 2^-9.
  if (magnitude < 0x3c800000u)
    return static_cast<std::uint8_t>(sign | (bits_of(float_of(magnitude) + 0x1p14f) - bits_of(0x1p14f)));
  const std::uint32_t rounded = magnitude + 0x7ffffu + (magnitude >> 20 & 1u);
  return static_cast<std::uint8_t>(sign | (rounded - (120u << 23)) >> 20);
}

FLEXEP_CONVERT float e4m3_to_f32(std::uint8_t b) {
  const std::uint32_t sign = static_cast<std::uint32_t>(b & 0x80u) << 24, magnitude = b & 0x7fu;
  if (magnitude == kNanE4m3) return float_of(kNanF32);
  if (magnitude < 8) return float_of(sign | bits_of(static_cast<float>(magnitude) * 0x1p-9f));
  return float_of(sign | ((magnitude << 20) + (120u << 23)));
}

/// The scale of a block whose largest magnitude is `amax`.
FLEXEP_CONVERT float scale_of(float amax) {
  const float scale = amax / kLargestE4m3;
  return scale == 0.0f ? 1.0f : scale;
}

struct QuantizeArgs {
  std::uint8_t* payload;  // [rows, hidden], dense
  float* scales;          // [rows, ceil(hidden / 128)]
  RowsIn src;             // [tokens, hidden] of f32, f16 or bf16; hidden is a multiple of 16
  // As in expand_rows: each token is cast once and written to its rows. Null, both: row t is token t.
  const std::int32_t* row_map;  // [tokens, top_k]
  const std::int32_t* row_src;  // [rows]: a row where it is -1 gets payload and scales +0
  std::int64_t tokens, top_k, rows, hidden;
};

void quantize_rows(const QuantizeArgs& args, int threads);
void quantize_rows_cuda(const QuantizeArgs& args, std::uintptr_t stream);

struct DequantizeArgs {
  void* out;  // [rows, hidden] of out_dtype, dense
  DType out_dtype;
  RowsIn payload;       // [rows, hidden], u8
  const float* scales;  // [rows, ceil(hidden / 128)]
  std::int64_t rows, hidden;
};

void dequantize_rows(const DequantizeArgs& args, int threads);
void dequantize_rows_cuda(const DequantizeArgs& args, std::uintptr_t stream);

}  // namespace flexep
