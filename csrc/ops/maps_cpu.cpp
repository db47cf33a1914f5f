#include <algorithm>
#include <vector>

#include "base/math.h"
#include "ops/maps.h"

namespace flexep {

void indices_to_multihot(std::uint8_t* mask, float* probs, const std::int32_t* idx, const float* weights,
                         MapShape shape) {
  std::fill_n(mask, shape.tokens * shape.experts, std::uint8_t{0});
  if (weights) std::fill_n(probs, shape.tokens * shape.experts, 0.0f);
  for (std::int64_t slot = 0; slot < shape.tokens * shape.top_k; ++slot) {
    if (idx[slot] < 0) continue;
    const std::int64_t at = slot / shape.top_k * shape.experts + idx[slot];
    if (weights) probs[at] = mask[at] ? probs[at] + weights[slot] : weights[slot];
    mask[at] = 1;
  }
}

std::int64_t multihot_to_indices(std::int32_t* idx, float* weights, const std::uint8_t* mask,
                                 const float* probs, MapShape shape) {
  std::int64_t too_wide = -1;
  for (std::int64_t t = 0; t < shape.tokens; ++t) {
    std::int32_t* const row = idx + t * shape.top_k;
    std::int64_t k = 0;
    for (std::int64_t e = 0; e < shape.experts; ++e) {
      if (!mask[t * shape.experts + e]) continue;
      if (k == shape.top_k) {
        if (too_wide < 0) too_wide = t;
        break;
      }
      if (probs) weights[t * shape.top_k + k] = probs[t * shape.experts + e];
      row[k++] = static_cast<std::int32_t>(e);
    }
    if (probs) std::fill_n(weights + t * shape.top_k + k, shape.top_k - k, 0.0f);
    std::fill_n(row + k, shape.top_k - k, -1);
  }
  return too_wide;
}

std::int64_t widest_row(const std::uint8_t* mask, MapShape shape) {
  std::int64_t widest = 0;
  for (std::int64_t t = 0; t < shape.tokens; ++t)
    widest = std::max<std::int64_t>(
        widest, std::count(mask + t * shape.experts, mask + (t + 1) * shape.experts, std::uint8_t{1}));
  return widest;
}

void pad_routing_map(std::uint8_t* out, const std::uint8_t* mask, MapShape shape, std::int64_t multiple) {
  std::vector<std::int64_t> missing(shape.experts, 0);
  for (std::int64_t i = 0; i < shape.tokens * shape.experts; ++i) missing[i % shape.experts] += mask[i];
  for (std::int64_t& column : missing) column = align_up(column, multiple) - column;
  for (std::int64_t t = 0; t < align_up(shape.tokens, multiple); ++t) {
    for (std::int64_t e = 0; e < shape.experts; ++e) {
      const std::int64_t at = t * shape.experts + e;
      out[at] = t < shape.tokens && mask[at];
      if (!out[at] && missing[e] > 0) {
        out[at] = 1;
        --missing[e];
      }
    }
  }
}

}  // namespace flexep
